"""Data: one global order, shared out to readers, with a position that can be saved."""

from __future__ import annotations
