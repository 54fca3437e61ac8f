"""Look into checkpoints of accel-core, and compare two, without torch.

Importing this package imports nothing of it: accel-core reads the cards first.
"""

from __future__ import annotations

__all__: list[str] = []
__version__ = "0.1.0"
