"""Starting workers, and reporting what fails in them."""

from __future__ import annotations
