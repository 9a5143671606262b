"""Qwen2.5-VL and Qwen3-VL: vision tower, text decoder, positions, pre-processing, checkpoints."""
