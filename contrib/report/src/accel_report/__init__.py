"""The record of a run as a page, a summary or a live screen.

Importing this package imports none of its modules.
"""

from __future__ import annotations

__all__: list[str] = []
__version__ = "0.1.0"
