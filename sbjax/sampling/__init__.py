"""Making videos chunk by chunk: prompt switches, a re-computed cache, files that grow meanwhile."""
