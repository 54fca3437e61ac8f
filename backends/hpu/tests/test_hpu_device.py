"""The probe on made-up machines, and what the plugin asks of Gaudi's software."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_core import Accelerator, ConfigError, World
from accel_hpu import HpuConfig, device, machine
from accel_hpu.device import HpuDevice
from accel_hpu.machine import probe
from accel_testing.simulated.simulate import simulate_plugin

DEVICE = torch.device("cpu")  # only handed through
STAND_IN = Path(__file__).parent / "stand_in"


class Gaudi:
    """habana_frameworks.torch, as far as the plugin uses it."""

    def __init__(self, name: str = "GAUDI2", *, lazy: bool = True) -> None:
        self.imported: list[str] = []
        self.lazy = lazy
        self.cuts = 0
        self.cached: list[Any] = []
        self.hpu = SimpleNamespace(
            ModuleCacher=lambda: self._cache, get_device_name=lambda: name, device_count=lambda: 8
        )
        self.core = SimpleNamespace(mark_step=self._cut)

    def module(self, name: str) -> Any:
        self.imported.append(name)
        if name == "utils.internal":
            return SimpleNamespace(is_lazy=lambda: self.lazy)
        return getattr(self, name, None)

    def _cut(self) -> None:
        self.cuts += 1

    def _cache(self, *, model: Any, allow_unused_input: bool, inplace: bool) -> None:
        self.cached.append(model)


def plugin(monkeypatch: pytest.MonkeyPatch, gaudi: Gaudi, config: HpuConfig | None = None) -> HpuDevice:
    monkeypatch.setattr(device, "vendor", gaudi.module)
    run: Any = SimpleNamespace(world=World())
    made = HpuDevice(config, run)
    made.below = SimpleNamespace(capabilities=lambda _: frozenset({"bf16", "fp16"}))
    return made


# -- the probe -----------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with the software and the driver, and no device yet."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    monkeypatch.delenv(machine.LAZY, raising=False)
    (tmp_path / "sys/module/habanalabs").mkdir(parents=True)
    (tmp_path / "dev/accel").mkdir(parents=True)
    return tmp_path


def hpus(root: Path, count: int) -> None:
    for number in range(count):
        (root / f"dev/accel/accel{number}").touch()
        (root / f"dev/accel/accel_controlD{number}").touch()


def test_a_machine_with_software_driver_and_device_is_usable(here: Path) -> None:
    hpus(here, 8)

    assert probe() is None


def test_without_the_software_the_reason_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "habana_frameworks is not installed" in (probe() or "")


def test_without_the_driver_the_reason_names_it(here: Path) -> None:
    (here / "sys/module/habanalabs").rmdir()

    assert "habanalabs driver is not loaded" in (probe() or "")


def test_a_container_without_devices_is_told(here: Path) -> None:
    assert "is given no HPU" in (probe() or "")


@pytest.mark.parametrize(("mask", "count"), [(None, 4), ("0,1", 2), ("", 0)])
def test_devices_are_counted_behind_the_mask(
    here: Path, monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int
) -> None:
    hpus(here, 4)
    if mask is not None:
        monkeypatch.setenv(machine.VISIBLE, mask)

    assert machine.visible_devices(None) == count  # type: ignore[arg-type]
    assert (probe() is None) == (count > 0)


@pytest.mark.parametrize(("lazy", "variables"), [(True, "1"), (False, "0"), (None, None)])
def test_the_mode_is_told_before_the_software_is_imported(lazy: bool | None, variables: str | None) -> None:
    config: Any = SimpleNamespace(plugins={"hpu": HpuConfig(lazy=lazy)})

    assert machine.launch_environment(config, World()).get(machine.LAZY) == variables


# -- the device ----------------------------------------------------------------------------------


def test_lazy_mode_cuts_its_graph_after_backward_and_step(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi = Gaudi()
    made = plugin(monkeypatch, gaudi)
    for point in ("batch", "backward", "step", "host_read", "state"):
        made.mark_step(point)

    assert gaudi.cuts == 2


def test_eager_mode_has_no_graph_to_cut(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi = Gaudi(lazy=False)
    plugin(monkeypatch, gaudi).mark_step("step")

    assert (gaudi.cuts, "core" in gaudi.imported) == (0, False)


def test_graphs_record_models_that_are_trained_after_wrapping(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi, model = Gaudi(), torch.nn.Linear(1, 1)
    made = plugin(monkeypatch, gaudi, HpuConfig(graphs=True))
    for phase in ("compile", "post"):
        made.transform_model(SimpleNamespace(optimizers=[1]), model, phase)  # type: ignore[arg-type]
    made.transform_model(SimpleNamespace(optimizers=[]), model, "post")  # type: ignore[arg-type]

    assert gaudi.cached == [model]


def trained_and_teacher(stand_in: str) -> tuple[int, int]:
    """How many models were recorded: after one was prepared to be trained, and after one that is not."""
    sys.path.insert(0, stand_in)
    simulate_plugin("hpu", "hccl", None)
    from habana_frameworks.torch import hpu

    accelerator = Accelerator(device="hpu", plugins=[HpuConfig(graphs=True)])
    model, teacher = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    first = len(hpu.CACHED)
    accelerator.prepare(teacher)
    return first, len(hpu.CACHED)


def test_a_run_records_what_it_trains(run_processes) -> None:
    assert run_processes(trained_and_teacher, str(STAND_IN), world=1) == [(1, 1)]


def test_graphs_in_eager_mode_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plugin(monkeypatch, Gaudi(lazy=False), HpuConfig(graphs=True))

    assert ["this is eager mode" in reason for reason in made.refuse(compiling(None))] == [True]


def test_gaudis_deepspeed_is_told_where_it_runs() -> None:
    config: Any = SimpleNamespace(plugins={})

    assert machine.launch_environment(config, World()) == {"DEEPSPEED_USE_HPU": "true"}


def compiling(backend: str | None) -> Any:
    return SimpleNamespace(compile=SimpleNamespace(backend=backend))


@pytest.mark.parametrize("lazy", [True, False])
def test_lazy_mode_cannot_compile(here: Path, monkeypatch: pytest.MonkeyPatch, lazy: bool) -> None:
    """The mode is the one that Gaudi's software says: its default differs by release."""
    made = plugin(monkeypatch, Gaudi(lazy=lazy))

    assert bool(made.refuse(compiling("auto"))) == lazy
    assert made.refuse(compiling("no")) == []


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("0", False)])
def test_a_mode_that_a_variable_of_the_user_overrides_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, value: str, refused: bool
) -> None:
    monkeypatch.setenv(machine.LAZY, value)
    gaudi = Gaudi(lazy=refused)
    said = plugin(monkeypatch, gaudi, HpuConfig(lazy=False)).refuse(compiling("no"))

    assert bool(said) == refused
    assert not refused or said[0].startswith("hpu.lazy is False, but PT_HPU_LAZY_MODE='1'")


@pytest.mark.parametrize("lazy", [True, False])
def test_a_mode_that_comes_after_gaudis_software_was_imported_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, lazy: bool
) -> None:
    monkeypatch.setenv(machine.LAZY, str(int(lazy)))  # as the run sets it: torch has imported all before
    said = plugin(monkeypatch, Gaudi(lazy=not lazy), HpuConfig(lazy=lazy)).refuse(compiling("no"))

    assert ["imported in the other mode before the run" in reason for reason in said] == [True]
    assert said[0].endswith(f"or with PT_HPU_LAZY_MODE={int(lazy)}")


# -- buckets -------------------------------------------------------------------------------------

BUCKETS = HpuConfig(buckets=(4, 8))


def placed(monkeypatch: pytest.MonkeyPatch, batch: Any, config: HpuConfig = BUCKETS) -> Any:
    return plugin(monkeypatch, Gaudi(), config).place_batch(None, batch, DEVICE)


@pytest.mark.parametrize(("length", "becomes"), [(1, 4), (4, 4), (5, 8), (8, 8)])
def test_sequences_are_padded_to_the_next_bucket(
    here: Path, monkeypatch: pytest.MonkeyPatch, length: int, becomes: int
) -> None:
    batch = {name: torch.ones(2, length, dtype=torch.long) for name in ("input_ids", "labels", "weights")}

    found = placed(monkeypatch, batch)

    assert found["input_ids"].tolist() == [[1] * length + [0] * (becomes - length)] * 2
    assert found["labels"].tolist() == [[1] * length + [-100] * (becomes - length)] * 2
    assert found["weights"].shape == (2, length)  # nobody said with what


def test_features_of_each_position_are_padded_along_the_sequence(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = HpuConfig(buckets=(4,), padding={"0": 7.0})

    inputs, targets = placed(monkeypatch, (torch.zeros(2, 3, 5), torch.zeros(2)), config)

    assert inputs.shape == (2, 4, 5)
    assert inputs[:, 3].unique().tolist() == [7.0]
    assert targets.shape == (2,)


def test_a_sequence_longer_than_every_bucket_is_an_error_not_cut(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="input_ids of this batch has length 9, the longest bucket is 8"):
        placed(monkeypatch, {"input_ids": torch.zeros(1, 9)})


def test_unless_asked_batches_stay_as_they_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"input_ids": torch.zeros(1, 9)}

    assert placed(monkeypatch, batch, HpuConfig()) is batch
    assert batch["input_ids"].shape == (1, 9)


def test_padding_is_a_graph_of_its_own(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi = Gaudi()
    plugin(monkeypatch, gaudi, BUCKETS).mark_step("batch")

    assert gaudi.cuts == 1


def test_the_order_of_buckets_does_not_matter() -> None:
    assert HpuConfig(buckets=[8, 4, 8]).buckets == (4, 8)


@pytest.mark.parametrize(("chip", "able"), [("GAUDI", {"bf16"}), ("GAUDI3", {"bf16", "fp16"})])
def test_fp16_depends_on_the_chip(
    here: Path, monkeypatch: pytest.MonkeyPatch, chip: str, able: set[str]
) -> None:
    assert plugin(monkeypatch, Gaudi(chip)).capabilities(DEVICE) == able


# -- against the vendor's own use of its software -------------------------------------------------

source = pytest.mark.skipif(
    "ACCEL_TEST_VENDOR" not in os.environ, reason="optimum-habana is not at hand (ACCEL_TEST_VENDOR)"
)


def handed(name: str) -> list[set[str | None]]:
    """Keywords of each call in optimum-habana of a `name`, or of what `name()` gave."""
    files = (Path(os.environ["ACCEL_TEST_VENDOR"]) / "optimum" / "habana").rglob("*.py")
    trees = (ast.parse(text) for file in files if name in (text := file.read_text()))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ends = [(call, ast.unparse(call.func).removesuffix("()").rpartition(".")[2]) for call in calls]
    return [{keyword.arg for keyword in call.keywords} for call, end in ends if end == name]


@source
def test_gaudis_own_trainer_records_models_as_we_do() -> None:
    assert {"model", "allow_unused_input", "inplace"} in handed("ModuleCacher")


@source
def test_gaudis_own_trainer_cuts_graphs_as_we_do() -> None:
    assert set() in handed("mark_step")


@source
@pytest.mark.parametrize("word", ["'hccl'", "'hpu_backend'", "'PT_HPU_LAZY_MODE'"])
def test_gaudis_own_trainer_has_our_words(word: str) -> None:
    folder = Path(os.environ["ACCEL_TEST_VENDOR"]) / "optimum" / "habana"

    assert any(word in file.read_text().replace('"', "'") for file in folder.rglob("*.py"))
