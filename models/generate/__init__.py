"""Generation with a cache: many requests at once, each as if it were alone."""
