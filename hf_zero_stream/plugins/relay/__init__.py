"""One rank reads for others, of all hosts or of its own (``read_from``), and for those that lack pieces of a state."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin("relay", tools={"relay": f"{__name__}.relay"})
