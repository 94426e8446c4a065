"""Formats of checkpoints, what is checked of their files, and lazy tensors, which carry only their layout."""
