"""The conformance kit, for both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_problem import accelerator, net, optimizer_of, plugin, steps_of

from accel_core.testing import ProcessError, conform, run_processes
from accel_core.testing.simulated import declare


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_it_conforms(tmp_path: Path, version: int) -> None:
    options = ("--accel-level", "0,1,2,3", "--accel-set", f"fsdp.fsdp_version={version}")

    printed = conform(tmp_path, "fsdp", *options)

    # What only whole weights on each rank can show, in worlds of one and two.
    assert "0 failed, 0 xfailed, 10 skipped" in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [2, 1])
def test_checkpoints_go_on_in_any_strategy_and_world(tmp_path: Path, version: int) -> None:
    options = ("--accel-level", "4", "--accel-set", f"fsdp.fsdp_version={version}")

    assert "0 failed, 0 xfailed, 0 skipped" in conform(tmp_path, "fsdp", *options)


def simulated(folder: str) -> list[float]:
    declare(Path(folder))
    run = accelerator(plugin("mlp", 2), device="sim")
    model = net("mlp")
    model, optimizer = run.prepare(model, optimizer_of(model))
    return list(steps_of(run, model, optimizer, "mlp", range(2)))


@pytest.mark.xfail(
    strict=True,
    raises=ProcessError,
    reason="fully_shard wants streams and events of a device, and frees its tensors' storage; the simulated"
    " device has neither: its tensors stand for others in the CPU's memory. Wrapping works, forward does not",
)
def test_it_trains_on_the_simulated_device(tmp_path: Path) -> None:
    run_processes(simulated, str(tmp_path), world=1)
