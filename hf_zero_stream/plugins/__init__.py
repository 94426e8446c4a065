"""Plug-ins, each of which can be removed: the ``__init__.py`` of its folder says as data what it brings.

See :mod:`hf_zero_stream.registry`. Nothing outside this folder imports anything of it.
"""
