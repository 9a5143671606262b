"""Algorithms: transitions, advantages, step subsets and objectives, as pure functions."""
