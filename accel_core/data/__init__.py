"""Data: one global order, shared out to readers, with a position to save."""

from __future__ import annotations
