"""All that a plugin author imports: hooks, cards, options, and the types that hooks are called with."""

from __future__ import annotations
