"""What can be taken away: each folder is a plug-in, whose ``__init__.py`` says as data what it brings.

See :mod:`hf_zero_stream.registry.plugins`. Nothing outside this folder imports anything of it.
"""
