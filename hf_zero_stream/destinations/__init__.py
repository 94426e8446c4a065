"""Destinations of bytes: the memory that each rank's part of a model lives in."""
