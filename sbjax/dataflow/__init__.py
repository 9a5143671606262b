"""The RL step as a graph of tasks, the schemes that shape it, and plans that place it. No JAX."""
