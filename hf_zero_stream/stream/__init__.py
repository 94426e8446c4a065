"""Weights of a sharded training for those who use them beside it, again and again; no files."""
