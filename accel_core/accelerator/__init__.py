"""The Accelerator, and helpers around its loop."""

from __future__ import annotations
