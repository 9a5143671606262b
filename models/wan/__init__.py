"""The Wan2.1 family: causal diffusion transformer, video autoencoder, text encoder, weights."""
