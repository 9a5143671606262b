"""sbjax: RL post-training of autoregressive video models, scheduled by true data dependencies."""

__version__ = "0.1.0"
