"""Formats of checkpoints, what is checked of their files, and lazy tensors, which carry only their layout."""

from . import lazy_ops as lazy_ops  # without them a lazy tensor has no ops
