"""`ipex.optimize`, for real, on the CPU: what it makes faster trains, and is saved, as without it."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ipex_jobs as jobs
import pytest
import torch

from accel_testing import ProcessError
from accel_xpu import IpexConfig, machine
from accel_xpu.ipex import Ipex
from accel_xpu.machine import probe_ipex

real = pytest.mark.skipif(find_spec("intel_extension_for_pytorch") is None, reason="needs ipex: tox -e ipex")


def one(run_processes, function: Any, *args: Any, **options: Any) -> Any:
    (found,) = run_processes(function, *args, world=1, timeout=100, **options)
    return found


# -- the probe -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"torch": "2.8.0+cpu", "intel-extension-for-pytorch": "2.8.0"}, None),
        ({"torch": "2.8.0+cpu"}, "pip install './backends/xpu[ipex]'"),
        (
            {"torch": "2.13.0", "intel-extension-for-pytorch": "2.8.0"},
            "2.8.0 was not built for torch 2.13.0",
        ),
    ],
    ids=["pair", "missing", "other torch"],
)
def test_it_is_usable_beside_the_torch_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], reason: str | None
) -> None:
    monkeypatch.setattr(machine, "_version", versions.get)

    found = probe_ipex()

    assert found is None if reason is None else reason in (found or "")


# -- what it refuses -----------------------------------------------------------------------------


def extension(kind: str = "cpu", **options: Any) -> Ipex:
    run: Any = SimpleNamespace(device=torch.device(kind))
    return Ipex(IpexConfig(**options), run)


def compiled_by_hand() -> tuple[list[str], bool]:
    """What is said when a model is compiled where ipex has optimized one."""
    from accel_xpu import ipex

    ipex._hide_warning_until_compilation()
    with warnings.catch_warnings(record=True) as before:
        warnings.warn("aten::layer_norm: an autograd kernel was not registered", stacklevel=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", "a model is being compiled")
        for _ in range(2):
            torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
        warnings.warn("aten::layer_norm: an autograd kernel was not registered", stacklevel=1)
    return [str(each.message).partition(";")[0] for each in told], bool(before)


def test_a_model_that_is_compiled_by_hand_later_is_noticed_once(run_processes) -> None:
    told, before = one(run_processes, compiled_by_hand)

    assert not before
    assert told == [
        "a model is being compiled in a process in which ipex has optimized a model",
        "aten::layer_norm: an autograd kernel was not registered",
    ]


def test_on_other_devices_it_is_refused() -> None:
    (reason,) = extension("cuda").refuse_unit(None, [torch.nn.Linear(1, 1)], [])  # type: ignore[arg-type]

    assert "this run is on cuda; leave ipex out" in reason


def test_what_it_has_for_cpus_only_is_refused_on_gpus() -> None:
    (reason,) = extension("xpu", optimize_lstm=True).refuse_unit(None, [], [])  # type: ignore[arg-type]

    assert "for CPUs only; leave them unset" in reason


def test_a_late_optimizer_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)

    (reason,) = extension().refuse_unit(None, [], [optimizer])  # type: ignore[arg-type]

    assert "prepare them in one call" in reason


def test_compiling_is_refused_for_it_loses_gradients() -> None:
    config: Any = SimpleNamespace(compile=SimpleNamespace(backend="inductor"))
    plain: Any = SimpleNamespace(compile=SimpleNamespace(backend="NO"))
    by_hand = torch.nn.Sequential(torch.nn.Linear(1, 1))
    by_hand[0].compile(backend="eager")

    (reason,) = extension().refuse(config)
    (of_model,) = extension().refuse_unit(None, [by_hand], [])  # type: ignore[arg-type]

    assert "parameters before a layer norm get no gradient\nleave ipex or torch.compile out" in reason
    assert "a model was compiled by torch.compile" in of_model
    assert extension().refuse(plain) == []


# -- for real ------------------------------------------------------------------------------------


@real
@pytest.mark.parametrize(("name", "fused"), [("SGD", True), ("Adam", True), ("AdamW", False)])
def test_losses_are_those_of_a_plain_loop_with_the_steps_it_can_fuse(
    name: str, fused: bool, run_processes
) -> None:
    losses, is_fused, lstm = one(run_processes, jobs.ours, name)

    assert losses == pytest.approx(jobs.plain(name), rel=1e-5)
    assert (is_fused, lstm) == (fused, "torch.nn.modules.rnn")


@real
def test_its_own_lstm_trains_the_same(run_processes) -> None:
    losses, _, lstm = one(run_processes, jobs.ours, "Adam", IpexConfig(optimize_lstm=True))

    assert losses == pytest.approx(jobs.plain("Adam"), rel=1e-5)
    assert lstm.startswith("intel_extension_for_pytorch")


@real
def test_bf16_is_cores_autocast(run_processes) -> None:
    losses, *_ = one(run_processes, jobs.bf16, "SGD")

    assert losses == pytest.approx(jobs.plain("SGD", bf16=True), rel=2e-2)
    assert losses != pytest.approx(jobs.plain("SGD"), rel=1e-5)


@real
def test_a_step_it_cannot_fuse_is_an_error_when_asked_for(run_processes) -> None:
    with pytest.raises(ProcessError, match="ipex has no fused step of AdamW on cpu"):
        one(run_processes, jobs.ours, "AdamW", IpexConfig(fuse_update_step=True))


@real
def test_each_optimizer_of_a_model_is_fused_and_holds_what_its_lstm_became(run_processes) -> None:
    fused, held = one(run_processes, jobs.several)

    assert fused == [True, True]
    assert held == [True, True]


@real
def test_hooks_on_the_optimizer_are_still_called(run_processes) -> None:
    assert one(run_processes, jobs.hooked) == 5


@real
def test_a_run_without_it_goes_on_with_what_it_saved(tmp_path: Path, run_processes) -> None:
    expected = one(run_processes, jobs.saved, str(tmp_path / "state"))

    assert one(run_processes, jobs.resumed_without, str(tmp_path / "state")) == pytest.approx(
        expected, rel=1e-5
    )


@real
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("stack", "worlds"),
    [("native+ipex", (1,)), pytest.param("ddp+ipex", (1, 2), marks=pytest.mark.needs("accel-ddp"))],
)
def test_it_conforms(tmp_path: Path, stack: str, worlds: tuple[int, ...], conform) -> None:
    xfails = tmp_path / "xfails"
    xfails.write_text("".join(f"{name}  # {reason}\n" for name, reason in known().items()))
    options = ("--accel-world", ",".join(map(str, worlds)), "--accel-xfails", str(xfails))

    assert conform(tmp_path, stack, *options).skipped == set()


LATE = "ipex.optimize takes a model and its optimizer together; a late optimizer is refused by name"


def known() -> dict[str, str]:
    """Checks of the kit that cannot pass, and why."""
    late = [
        f"2_training.py::test_objects_prepared_in_several_calls[{each}]"
        for each in ("late", "late_optimizer")
    ]
    return {f"test_{check}": LATE for check in late}
