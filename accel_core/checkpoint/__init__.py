"""Checkpoints: whole or not there, verified before use, readable by any stack at any world size.

`save` and `load` do it; docs/checkpoint-format.md says what is on the disk.
"""

from __future__ import annotations

__all__ = ["unheard"]

unheard: dict[str, tuple[int, str]] = {}
"""Background saves that have failed, by id: the process, and what nobody has been told yet."""
