"""A vendor's library that decides at import what it can do."""

from __future__ import annotations

import os

if os.environ.get("STRANGE_VENDOR_MODE") != "training":
    raise ImportError("STRANGE_VENDOR_MODE was not set before this library was imported")
