"""Weights that stay quantised: parameters of bytes, and modules that dequantise them in the forward pass."""
