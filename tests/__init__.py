"""Tests of hf_zero_stream."""
