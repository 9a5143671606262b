"""Rewards: the protocol, the world's reward and a user's own function."""
