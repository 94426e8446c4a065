"""Loads from headers to filled memory: of new models, of live ones, and those that are only planned."""
