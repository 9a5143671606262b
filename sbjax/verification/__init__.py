"""Replays of recorded values: what `python -m sbjax.verify` runs."""
