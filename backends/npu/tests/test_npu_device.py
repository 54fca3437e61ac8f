"""What the plugin asks of torch_npu, held against torch_npu's own source where that is at hand.

torch_npu cannot be imported without CANN, but its source can be read: ACCEL_TEST_VENDOR names a folder
that `pip install --no-deps --target FOLDER torch_npu` has filled.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import RunConfig
from accel_npu import NpuConfig, device
from accel_npu.card import NPU
from accel_npu.device import NpuDevice

DEVICE = torch.device("cpu")  # only handed through


class Scaler:
    """torch_npu.npu.amp.GradScaler, as far as the plugin uses it."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        self.init_scale, self.dynamic = init_scale, dynamic

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dynamic = state_dict["dynamic"]


class Chip:
    """torch_npu.npu, as far as the plugin uses it."""

    def __init__(self, *, bf16: bool = True, infinite: bool = True) -> None:
        self.bf16 = bf16
        self.utils = SimpleNamespace(is_support_inf_nan=lambda: infinite)
        self.amp = SimpleNamespace(GradScaler=Scaler)
        self.compile_modes: list[bool] = []
        self.matmul, self.conv = SimpleNamespace(), SimpleNamespace()

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return self.bf16

    def set_compile_mode(self, jit_compile: bool = False) -> None:
        self.compile_modes.append(jit_compile)


def plugin(monkeypatch: pytest.MonkeyPatch, chip: Chip, config: NpuConfig | None = None) -> NpuDevice:
    monkeypatch.setattr(device, "vendor", lambda: chip)
    run: Any = SimpleNamespace(config=RunConfig(mixed_precision="fp16"))
    made = NpuDevice(config, run)
    made.below = SimpleNamespace(
        select_device=lambda _: DEVICE,
        capabilities=lambda _: frozenset({"bf16", "fp16"}),
        grad_scaler=lambda _: None,
    )
    return made


@pytest.mark.parametrize(("found", "refused"), [("2", True), ("1", False)])
def test_an_affinity_that_a_variable_of_the_user_overrides_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str, refused: bool
) -> None:
    monkeypatch.setenv("CPU_AFFINITY_CONF", found)
    config: Any = None
    said = plugin(monkeypatch, Chip(), NpuConfig(cpu_affinity="1")).refuse(config)

    assert bool(said) == refused
    assert not refused or said[0].startswith(
        "npu.cpu_affinity is '1', but torch_npu reads CPU_AFFINITY_CONF='2'"
    )


@pytest.mark.parametrize(("chip", "able"), [(True, {"bf16", "fp16"}), (False, {"fp16"})])
def test_bf16_depends_on_the_chip(monkeypatch: pytest.MonkeyPatch, chip: bool, able: set[str]) -> None:
    assert plugin(monkeypatch, Chip(bf16=chip)).capabilities(DEVICE) == able


def test_the_vendors_scaler_is_used_where_overflow_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    unit: Any = SimpleNamespace()
    saturating, infinite = plugin(monkeypatch, Chip(infinite=False)), plugin(monkeypatch, Chip())

    assert isinstance(saturating.grad_scaler(unit), Scaler)
    assert infinite.grad_scaler(unit) is None  # which leaves it to the precision


def test_the_vendors_scaler_takes_the_state_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    unit: Any = SimpleNamespace()
    scaler: Any = plugin(monkeypatch, Chip(infinite=False)).grad_scaler(unit)
    ours = torch.amp.GradScaler("cpu")
    ours.scale(torch.ones(()))

    scaler.load_state_dict(ours.state_dict())

    assert scaler.dynamic is True


def test_a_strategy_with_a_scaler_of_its_own_is_refused_where_overflow_saturates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: Any = SimpleNamespace(strategy="own", hooks=SimpleNamespace(grad_scaler=lambda _: None))
    stepped = [torch.optim.SGD([torch.zeros(1)])]

    assert (
        "strategy 'own' has its own"
        in plugin(monkeypatch, Chip(infinite=False)).refuse_unit(own, [], stepped)[0]
    )
    assert not plugin(monkeypatch, Chip()).refuse_unit(own, [], stepped)


def test_compilation_is_the_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NPU.compile_backend == "npu"


def test_switches_are_set_when_the_device_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip()
    plugin(monkeypatch, chip, NpuConfig(jit_compile=False, allow_hf32=True)).select_device(None)  # type: ignore[arg-type]

    assert chip.compile_modes == [False]
    assert chip.matmul.allow_hf32 is True
    assert chip.conv.allow_hf32 is True


def test_switches_nobody_named_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = Chip()
    plugin(monkeypatch, chip).select_device(None)  # type: ignore[arg-type]

    assert (chip.compile_modes, vars(chip.matmul)) == ([], {})


# -- against the vendor's source -----------------------------------------------------------------

ASKED = {
    "npu/__init__.py": {"is_available": 0, "device_count": 0, "get_device_name": 1},
    "npu/utils.py": {
        "is_bf16_supported": 0,
        "is_support_inf_nan": 0,
        "get_cann_version": 0,
        "set_device": 1,
        "synchronize": 1,
    },
    "npu/npu_config.py": {"set_compile_mode": 1},
    "npu/memory.py": {
        "memory_allocated": 1,
        "memory_reserved": 1,
        "max_memory_allocated": 1,
        "empty_cache": 0,
    },
    "npu/random.py": {"get_rng_state": 1, "set_rng_state": 2, "manual_seed": 1, "manual_seed_all": 1},
}
"""Module of torch_npu -> function -> positional arguments that we, or core's base layer, hand over."""

source = pytest.mark.skipif(
    "ACCEL_TEST_VENDOR" not in os.environ, reason="torch_npu's source is not at hand (ACCEL_TEST_VENDOR)"
)


def tree(name: str) -> ast.Module:
    return ast.parse((Path(os.environ["ACCEL_TEST_VENDOR"]) / "torch_npu" / name).read_text())


@source
@pytest.mark.parametrize("module", ASKED)
def test_torch_npu_has_what_is_asked_of_it(module: str) -> None:
    functions = {node.name: node.args for node in tree(module).body if isinstance(node, ast.FunctionDef)}

    for name, handed in ASKED[module].items():
        takes = functions[name].args
        needs = len(takes) - len(functions[name].defaults)
        assert needs <= handed <= len(takes), name


@source
def test_torch_npu_has_the_switches() -> None:
    assigned = {
        target.id
        for node in tree("npu/__init__.py").body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    text = ast.dump(tree("npu/npu_config.py"))

    assert {"matmul", "conv"} <= assigned
    assert "'allow_hf32'" in text


@source
def test_torch_npu_calls_its_collectives_hccl() -> None:
    assert "'hccl'" in ast.dump(tree("_init/registry/distributed.py"))


@source
def test_torch_npus_scaler_is_the_stand_in() -> None:
    (scaler,) = (
        node
        for node in tree("npu/amp/grad_scaler.py").body
        if isinstance(node, ast.ClassDef) and node.name == "GradScaler"
    )
    made = next(node for node in scaler.body if getattr(node, "name", "") == "__init__")
    assert isinstance(made, ast.FunctionDef)
    assert [argument.arg for argument in made.args.args] == list(
        inspect.signature(Scaler.__init__).parameters
    )
    assert "'dynamic'" in ast.dump(scaler)
