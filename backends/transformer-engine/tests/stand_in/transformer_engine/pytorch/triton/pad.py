"""A kernel of Triton."""

from __future__ import annotations

pad_columnwise_scale_inv = None
