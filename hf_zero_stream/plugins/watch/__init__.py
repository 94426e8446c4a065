"""Watch over the ranks of a process group: a death is told within seconds, and where it was; see docs/errors.md."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin("watch", tools={"HostWatch": f"{__name__}.watch:HostWatch"})
