"""The run: its plugins chosen, made and joined to the other processes."""

from __future__ import annotations
