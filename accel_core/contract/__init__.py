"""All that a plugin author imports: hooks, cards, options, arguments of hooks."""

from __future__ import annotations
