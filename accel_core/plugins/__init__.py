"""Plugins: found, loaded, checked against the hooks, and combined."""

from __future__ import annotations
