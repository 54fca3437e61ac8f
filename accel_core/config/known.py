"""What core may say of plugins that are not installed: data, generated from the workspace.

Install hints quote this list only, never what somebody typed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

from accel_core.plugins import Discovery, Slot, near

__all__ = ["Known", "absence", "known"]


@frozen(kw_only=True)
class Known:
    """A first-party plugin: its name, slot, options, and the distribution that ships it."""

    name: str
    slot: str
    distribution: str
    keys: tuple[str, ...] = ()


@cache
def known() -> dict[str, Known]:
    """Name -> first-party plugin, installed or not. Read on first use."""
    import yaml

    path = Path(__file__).parent.parent / "known.yaml"
    rows: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["plugins"]
    return {
        row["name"]: Known(
            name=row["name"],
            slot=row["slot"],
            distribution=row["distribution"],
            keys=tuple(row.get("keys") or ()),
        )
        for row in rows
    }


def absence(name: str, slot: Slot, discovery: Discovery) -> str:
    """That no plugin of the slot has this name, and what to do."""
    record = discovery.get(name)
    installed = [record.name for record in discovery.of(slot)]
    if record is not None:
        remedy = f"; {name} is a {record.slot}"
    elif name in known():
        remedy = f"; pip install {known()[name].distribution}"
    else:
        remedy = near(name, installed) or f"; installed: {', '.join(installed) or 'none'}"
    return f"no {slot} {name!r} is installed{remedy}"
