"""Toy stacks: plugin instances in layers, over the toy contract."""

from __future__ import annotations

from typing import Any

import toy_specs

from accel_core.plugins.binding import Binder, Hooks


def stack(**plugins: Any) -> Hooks:
    """Hooks of instances by slot, in the order given: `stack(base=Base(), device=Device())`."""
    binder = Binder(toy_specs)
    return binder.hooks([binder.register(each, name=slot, slot=slot) for slot, each in plugins.items()])
