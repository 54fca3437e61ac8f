"""The seed of the draw stands above the results, and libraries that take seconds are imported once."""

from __future__ import annotations

import os

from stack_space import SEED, seed

# Not megatron-core, which takes layers of Transformer Engine if it finds that as it is imported.
os.environ.setdefault(
    "ACCEL_TEST_PRELOAD",
    "torch._inductor.compile_fx,deepspeed,torchao.float8,transformers.models.gpt2.modeling_gpt2",
)


def pytest_report_header() -> str:
    """Say how the same stacks are drawn again."""
    return f"stacks are drawn by {SEED}={seed()}"
