"""What users hold: the Accelerator, and helpers around its loop."""

from __future__ import annotations
