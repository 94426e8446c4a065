"""Plug-ins, formats and rows of replaced functions, as data."""
