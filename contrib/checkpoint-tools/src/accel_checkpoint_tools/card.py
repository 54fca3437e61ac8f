"""The cards: accel-core reads them before any other module of this package."""

from __future__ import annotations

from accel_core import Card

__all__ = ["DIFF", "SHOW"]

DIFF = Card(
    name="checkpoint-diff",
    slot="command",
    summary="Say how two checkpoints differ, tensor by tensor, and where else.",
    api_version="1.0",
    implementation="accel_inspect.commands:diff",
)

SHOW = Card(
    name="checkpoint-show",
    slot="command",
    summary="Show the tensors of a checkpoint as a tree: shapes, dtypes, bytes, files.",
    api_version="1.0",
    implementation="accel_inspect.commands:show",
)
