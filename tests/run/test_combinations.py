"""Each device with each strategy, and what stands above: it trains, simulated, or is refused by name."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from torch import nn

from accel_core import Accelerator, ConfigError
from accel_core.contract.card import Card
from accel_core.plugins.discovery import discover
from accel_testing import Conformance
from accel_testing.simulated import write_distribution

BACKENDS = Path(__file__).parents[2] / "backends"
COMMUNICATION = {"cuda": "nccl", "npu": "hccl", "musa": "mccl", "mlu": "cncl", "sdaa": "tccl"}
COMMUNICATION |= {"xpu": "xccl", "hpu": "hccl", "mps": "none", "xla": "none"}
pytestmark = pytest.mark.needs(
    *(f"accel-{device}" for device in COMMUNICATION), "accel-ddp", "accel-fsdp", "accel-context-parallel"
)
REAL = ("xla",)
"""Devices that nothing simulates: their own packages try them on the real library."""
STANDS_IN = ("cuda", "xpu", "mps")
"""Devices of torch's own, for which a module answers; the others have a stand-in for their library."""
ELSEWHERE = {
    "ddp": "each device's own package runs the whole kit with it",
    "deepspeed": "it drives each chip by a layer of its own, which asks the vendor's library itself",
    "megatron": "it calls torch.cuda by name",
    "bitsandbytes": "its layers are for the kinds of device that its library has kernels for",
    "ema": "it is no device's matter: its own package runs the kit with it under strategies",
    "replicas": "it is no device's matter: its own package runs the kit with it under a strategy",
    "mirror": "it copies checkpoints, whatever wrote them",
    "ipex": "it is for Intel's own CPUs and GPUs, which its package tries",
}
"""What is not tried here, and why."""
BOUND = ("single", "xla-dp", "xla-spmd")
"""Strategies for any device, or only for those of their own package, whose tests say so."""
FROM_STRATEGIES = {"dtensors", "whole_weights"}
"""What extensions need of strategies, not of devices."""
ALONE = ("dispatched",)
"""Strategies that refuse to train on several ranks."""
ABOVE = {"cp": "ddp", "tensor-parallel": "fsdp"}
"""Extension -> the strategy that it is tried with."""
# Split where the widths of the kit's networks are even; its other networks stay whole.
PLAN = '{"*": null, "0": rowwise_rep, "3": rowwise_rep, "fixed": colwise_rep}'
SETTINGS = {
    "fsdp+tensor-parallel": (
        *("parallelism.dp_shard=1", "parallelism.tp=-1"),
        f"tensor_parallel.parallelize_plan={PLAN}",
    ),
    "ddp+cp": ("parallelism.cp=-1",),
}


def cards(slot: str) -> dict[str, Card]:
    return {record.name: record.card for record in discover().of(slot) if record.card is not None}


def pairs(*, allowed: bool) -> list[tuple[str, str]]:
    devices = {name: card for name, card in cards("device").items() if name in COMMUNICATION}
    above = [each for slot in ("strategy", "extension") for each in discover().of(slot) if each.card]
    usable = {each.name: each.card for each in above if each.status == "available" and each.name not in BOUND}
    return [
        (device, name)
        for (device, has), (name, wants) in product(devices.items(), usable.items())
        if wants and (wants.needs - FROM_STRATEGIES <= has.offers) == allowed
    ]


def stacks() -> list[tuple[str, str]]:
    """Device and what is above it, of what its card allows."""
    allowed = [(device, name) for device, name in pairs(allowed=True) if device not in REAL]
    found = [(device, name) for device, name in allowed if name not in ELSEWHERE]
    return [(device, f"{ABOVE[name]}+{name}" if name in ABOVE else name) for device, name in found]


def trained(
    conform, folder: Path, device: str, above: str, *options: str, levels: str = "2,3"
) -> Conformance:
    for library, version in {
        "torch_npu": "2.13.0",
        "torch_musa": "2.13.0",
        "torch_mlu": "1+torch2.13",
    }.items():
        write_distribution(folder, library, "\n", version=version, requires=())
    world = "1" if above in ALONE else "2"
    options += ("--accel-world", world, "--accel-level", levels, "--accel-simulate", COMMUNICATION[device])
    options += ("--accel-stand-in", f"stands_for_{device}") if device in STANDS_IN else ()
    for setting in SETTINGS.get(above, ()):
        options += ("--accel-set", setting)
    return conform(folder, f"{device}+{above}", *options, path=[BACKENDS / device / "tests" / "stand_in"])


def refused(device: str, name: str) -> str:
    from accel_core import Accelerator, ConfigError
    from accel_core.plugins.discovery import load
    from accel_testing.simulated.simulate import simulate_plugin

    simulate_plugin(device, COMMUNICATION[device], None)
    record = discover().get(name)
    assert record is not None
    assert record.card is not None
    asked = {"strategy": name}
    if record.slot == "extension":
        assert record.card.config is not None
        asked = {"plugins": [load(record, record.card.config)()]}
    try:
        Accelerator(device=device, **asked)
    except ConfigError as error:
        return str(error)
    return "it ran"


def test_every_device_and_every_strategy_is_among_the_combinations() -> None:
    both = {*pairs(allowed=True), *pairs(allowed=False)}

    assert {device for device, _ in both} == COMMUNICATION.keys()
    assert {name for _, name in both} >= {"ddp", "fsdp"}
    assert cards("extension").keys() <= {*ABOVE, *ELSEWHERE}


@pytest.mark.parametrize(("device", "name"), pairs(allowed=False))
def test_what_a_device_cannot_carry_is_refused_with_the_words_it_lacks(
    device: str, name: str, run_processes
) -> None:
    (said,) = run_processes(refused, device, name, world=1)

    above = {**cards("strategy"), **cards("extension")}
    lacking = above[name].needs - cards("device")[device].offers
    assert all(word in said for word in (device, name, *lacking)), said


def test_a_device_that_shards_has_no_code_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conform
) -> None:
    monkeypatch.delenv("ACCEL_KIT_REPORTS", raising=False)  # a part of a level is no result
    some = ("two_optimizers_of_one_model", "clipping_sees")

    found = trained(conform, tmp_path, "npu", "fsdp", "-k", " or ".join(some))

    assert found.skipped == set()
    assert all(any(name in check for check in found.passed) for name in some)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(device, marks=() if device == "cuda" else pytest.mark.full)
        for device, name in pairs(allowed=True)
        if name == "ddp"
    ],
)
def test_several_processes_on_a_device_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, conform
) -> None:
    monkeypatch.delenv("ACCEL_KIT_REPORTS", raising=False)  # a part of the kit is no result

    assert trained(conform, tmp_path, device, "ddp", levels="3").skipped == set()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("device", "above"), stacks())
def test_what_it_can_carry_trains_as_a_plain_loop(tmp_path: Path, device: str, above: str, conform) -> None:
    assert not trained(conform, tmp_path, device, above).failed


def joined_beside_a_sharded_model() -> list[str]:
    accelerator = Accelerator(device="cpu", strategy="ddp")
    model, sharded = nn.Linear(2, 1), nn.Linear(2, 1)
    model = accelerator.prepare(model)
    sharded = accelerator.prepare(sharded, strategy="fsdp")
    said = []
    for models in ([model, sharded], [sharded, model]):
        with pytest.raises(ConfigError) as caught, accelerator.join_uneven_inputs(models):
            pass
        said.append(str(caught.value))
    return said


def test_models_of_several_strategies_join_only_if_each_strategy_can(run_processes) -> None:
    for said in run_processes(joined_beside_a_sharded_model, world=2):
        for text in said:
            assert text.startswith("strategy 'fsdp' cannot train where ranks run out of batches at")
