"""Checkpoints: whole or absent, verified, readable by any stack and world size.

`session` is what a run has of it; docs/checkpoint-format.md says what is on the disk.
"""

from __future__ import annotations

__all__ = ["unreported"]

unreported: dict[str, tuple[int, str]] = {}
"""Background saves whose failure was not reported yet: id -> (process, message)."""
