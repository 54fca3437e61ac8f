"""Data: one global order, dealt to readers, which knows where it stands."""

from __future__ import annotations
