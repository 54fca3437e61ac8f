"""The conformance kit, for both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from fsdp_problem import accelerator, net, optimizer_of, plugin, steps_of, train_plainly

from accel_testing.simulated import declare

FROZEN = "".join(
    f"test_2_training.py::test_two_units_keep_windows_of_their_own[{steps}]  # frozen inside a window\n"
    for steps in (2, 4)
)
"""Checks that version 1 refuses, because torch drops the gradients of frozen parameters."""


def of_version_1(folder: Path) -> tuple[str, ...]:
    (folder / "xfails").write_text(FROZEN)
    return "--accel-set", "fsdp.fsdp_version=1", "--accel-xfails", str(folder / "xfails")


@pytest.mark.timeout(600)
def test_version_2_conforms_on_two_ranks(tmp_path: Path, conform) -> None:
    found = conform(tmp_path, "fsdp", "--accel-world", "2", "--accel-level", "2,3,4")

    assert found.skipped == {"whole_weights", "join", "local_sgd"}


@pytest.mark.timeout(600)
def test_version_1_trains_as_the_kit_wants(tmp_path: Path, conform) -> None:
    assert conform(tmp_path, "fsdp", "--accel-level", "2", *of_version_1(tmp_path)).skipped == set()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [2, 1])
def test_it_conforms(tmp_path: Path, version: int, conform) -> None:
    options = ("--accel-level", "0,1,2,3,4")
    options += of_version_1(tmp_path) if version == 1 else ()

    assert conform(tmp_path, "fsdp", *options).skipped == {"whole_weights", "join", "local_sgd"}


def simulated(folder: str) -> list[float]:
    declare(Path(folder))
    run = accelerator(plugin("mlp", 2), device="sim")
    model = net("mlp")
    model, optimizer = run.prepare(model, optimizer_of(model))
    return list(steps_of(run, model, optimizer, "mlp", range(2)))


def test_it_trains_on_a_device_that_is_not_the_cpu(tmp_path: Path, run_processes) -> None:
    (found,) = run_processes(simulated, str(tmp_path), world=1)

    assert found == pytest.approx(train_plainly("mlp", 2, world=1)[0], rel=1e-5)
