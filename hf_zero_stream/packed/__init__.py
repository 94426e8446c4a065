"""Weights that stay quantised: parameters of packed bytes, and the modules that dequantise them in the forward pass."""
