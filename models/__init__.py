"""Flax NNX ports of video and judge models. They know nothing of RL, rewards, Ray or schedules."""
