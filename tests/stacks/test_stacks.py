"""Stacks drawn from all that a user can select: each trains as one process does, or is refused by name."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import stack_job
from stack_refusals import expected
from stack_space import Stack, draw, seed

from accel_testing import decoder

pytestmark = [
    pytest.mark.needs(
        *("accel-ddp", "accel-fsdp", "accel-deepspeed", "accel-megatron", "accel-context-parallel"),
        *("accel-ema", "accel-monitor", "accel-bitsandbytes", "accel-torchao", "accel-transformer-engine"),
        *("accel-cuda", "accel-npu", "accel-musa", "accel-mlu", "accel-sdaa", "accel-xpu", "accel-hpu"),
        *("accel-mps", "accel-big-models", "deepspeed", "megatron-core", "transformers"),
    ),
    pytest.mark.timeout(300),
]
TRAINED, REFUSED = 10, 5
"""Stacks of a draw that have to train, and to be refused."""


def drawn(*, trains: bool, number: int) -> list[Any]:
    """The first stacks of the day's draw that train, or that are refused, each with its name."""
    chosen = dict.fromkeys(islice((it for it in draw(seed()) if (expected(it) is None) is trains), number))
    return [pytest.param(stack, id=str(stack)) for stack in chosen]


def run(run_processes: Callable[..., list[Any]], stack: Stack) -> list[Any]:
    if stack.precision == "fp8-te" and "ACCEL_TEST_VENDOR" not in os.environ:
        pytest.skip("ACCEL_TEST_VENDOR names no folder with Transformer Engine's own Python")
    return run_processes(stack_job.trained, stack, world=stack.world, environment=stack.variables, timeout=60)


def report(stack: Stack) -> None:
    """Leave the outcome for tools/stack_matrix.py, beside the reports of the kit."""
    if folder := os.environ.get("ACCEL_KIT_REPORTS"):
        refusal = expected(stack)
        facts = {"drawn": stack.facts, "seed": seed(), "refused": refusal and refusal.parts}
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"drawn-{uuid.uuid4().hex}.json").write_text(json.dumps(facts), encoding="utf-8")


@pytest.mark.parametrize("stack", drawn(trains=True, number=TRAINED))
def test_it_trains_as_one_process(stack: Stack, run_processes) -> None:
    for found in run(run_processes, stack):
        assert not isinstance(found, str), f"no rule of stack_refusals.py expects this refusal: {found}"
        decoder.assert_as_in_one_process(
            found,
            whole_windows=stack_job.has_whole_windows(stack),
            low_precision=stack.precision != "fp32",
            make=stack_job.model_of(stack),
        )
    report(stack)


@pytest.mark.parametrize("stack", drawn(trains=False, number=REFUSED))
def test_it_is_refused_by_name(stack: Stack, run_processes) -> None:
    for said in run(run_processes, stack):
        assert isinstance(said, str), f"it trains, and stack_refusals.py says: {expected(stack)}"
        assert "\n" in said, f"the refusal has no remedy: {said}"
    report(stack)


def test_the_same_seed_draws_the_same_stacks() -> None:
    first, again = (list(islice(draw(7), 50)) for _ in range(2))

    assert first == again
    assert first != list(islice(draw(8), 50))


@pytest.mark.parametrize("dim", ["cp", "ep", "pp", "tp"])
def test_float8_is_drawn_with_each_size(dim: str) -> None:
    some = islice(draw(1), 5000)

    assert any(
        dim in stack.dims and stack.precision.startswith("fp8") and expected(stack) is None for stack in some
    )
