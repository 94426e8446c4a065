"""Training states on the hosts' own disks or in their memory, with copies on other hosts; docs/state.md has them."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin(
    "hosts",
    mounts={"host_state.json": f"{__name__}.load:pieces_mounted"},
    tools={
        "HostPlace": f"{__name__}.save:HostPlace",
        "newest_on_hosts": f"{__name__}.load:newest_on_hosts",
        "checkpoint_by_settings": f"{__name__}.states:checkpoint_by_settings",
        "state_of_engine": f"{__name__}.states:state_of_engine",
        "save_between_steps": f"{__name__}.states:save_between_steps",
    },
)
