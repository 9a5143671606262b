"""Published Wan weights as a world: the user's files in, models, decoder and embeddings out."""
