"""The seed of the draw stands above the results, and libraries that take seconds are imported once."""

from __future__ import annotations

import os

from stack_space import SEED, seed

# Not torchao and megatron-core: both import Transformer Engine where its stand-in is on the path.
os.environ.setdefault("ACCEL_TEST_PRELOAD", "torch._inductor.compile_fx,deepspeed,transformers.models.gpt2")


def pytest_report_header() -> str:
    """Say how the same stacks are drawn again."""
    return f"stacks are drawn by {SEED}={seed()}"
