"""Discovery of plugins, their import, the check against the hooks, and their combination."""

from __future__ import annotations
