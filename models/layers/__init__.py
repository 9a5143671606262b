"""Layers that several models share: attention, rotary positions, norms, linear maps, LoRA."""
