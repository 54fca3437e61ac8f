"""Toy stacks: plugin instances in layers, over the toy contract."""

from __future__ import annotations

from typing import Any

import toy_specs

from accel_core.contract.bound import Hooks
from accel_core.plugins.manager import PluginManager


def stack(**plugins: Any) -> Hooks:
    """Hooks of instances by slot, in the order given: `stack(base=Base(), device=Device())`."""
    manager = PluginManager(toy_specs)
    for slot, each in plugins.items():
        manager.add_plugin(each, name=slot, slot=slot)
    return manager.hooks_of([*plugins])
