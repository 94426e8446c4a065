"""The source side: safetensors headers, byte sources and tensors that carry only their layout."""
