"""The operators that torchvision's index-less wheel, built for CUDA, cannot load beside a torch for the CPU.

Importing torchvision needs their names only; no program here calls them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")


def declare() -> None:
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
