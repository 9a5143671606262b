"""CLIP in open_clip's layout: image and text towers, pre-processing, tokens, checkpoints."""
