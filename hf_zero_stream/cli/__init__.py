"""The command line ``hf-zero-stream``; one module per command, none of which imports torch until it runs."""

from .app import app, main


__all__ = ["app", "main"]
