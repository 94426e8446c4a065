"""Saving: the map of a load, read backwards. Every rank writes its own bytes of the final shards."""
