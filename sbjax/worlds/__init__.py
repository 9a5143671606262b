"""Embedded worlds: small self-contained settings with data, a base model, judges and weights."""
