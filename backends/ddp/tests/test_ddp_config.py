"""Section `ddp`: the seeds' fields and defaults, and no setting that would be ignored."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from accel_ddp import DDPCommunicationHookType, DistributedDataParallelKwargs
from accel_ddp.config import POWER_SGD_OPTIONS

DEFAULTS = {
    "dim": 0,
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "comm_hook": DDPCommunicationHookType.NO,
    "comm_wrapper": DDPCommunicationHookType.NO,
    "comm_state_option": {},
}


def test_fields_and_defaults_are_those_people_know() -> None:
    assert attrs.asdict(DistributedDataParallelKwargs()) == DEFAULTS


def test_hooks_are_those_people_know() -> None:
    assert [hook.value for hook in DDPCommunicationHookType] == [
        "no",
        "fp16",
        "bf16",
        "power_sgd",
        "batched_power_sgd",
    ]


def test_every_field_but_those_of_the_hook_is_an_argument_of_torch() -> None:
    torchs = set(inspect.signature(DistributedDataParallel).parameters)

    assert {name for name in DEFAULTS if not name.startswith("comm_")} <= torchs


def test_only_what_differs_from_a_default_is_passed_on() -> None:
    assert DistributedDataParallelKwargs().to_kwargs() == {}
    assert DistributedDataParallelKwargs(bucket_cap_mb=25, dim=1).to_kwargs() == {"dim": 1}


def test_the_options_of_power_sgd_are_torchs() -> None:
    torchs = list(inspect.signature(PowerSGDState).parameters)

    assert sorted(["process_group", *POWER_SGD_OPTIONS]) == sorted(torchs)


@pytest.mark.parametrize("word", ["fp16", "bf16", "power_sgd", "batched_power_sgd", "no"])
def test_a_hook_may_be_named_by_its_word(word: str) -> None:
    assert DistributedDataParallelKwargs(comm_hook=word).comm_hook is DDPCommunicationHookType(word)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"comm_wrapper": "bf16"}, "no comm_hook to wrap; set comm_hook: bf16 instead"),
        ({"comm_hook": "fp16", "comm_wrapper": "power_sgd"}, "expected one of"),
        ({"comm_hook": "fp8"}, "'fp8' is not a valid"),
        ({"comm_hook": "fp16", "comm_state_option": {"warm_start": False}}, "not 'fp16'"),
        (
            {"comm_hook": "power_sgd", "comm_state_option": {"rank": 2}},
            "has no rank; it has matrix_approximation_rank",
        ),
        ({"bucket_cap_mb": 0}, "must be at least 1, got 0"),
    ],
)
def test_what_would_be_ignored_or_refused_later_is_refused_at_once(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedDataParallelKwargs(**given)
