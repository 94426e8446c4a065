"""The source side: safetensors headers, byte sources and tensors that carry only their layout."""

from . import lazy_ops as lazy_ops  # without them a lazy tensor has no ops
