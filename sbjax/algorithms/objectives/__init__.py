"""Objectives: each a loss over the scalars of a mini-batch, and its compressed form."""
