"""Start workers, and report the failure of one."""

from __future__ import annotations
