"""Benchmarks of hf_zero_stream."""
