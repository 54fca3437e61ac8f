"""Kernels of Triton."""

from __future__ import annotations

compute_grouped_dbias = compute_grouped_dbias_dscales = None
