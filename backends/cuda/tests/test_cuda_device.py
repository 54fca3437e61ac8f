"""What the plugin adds to the base layer, against a stand-in of torch.cuda."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core import ConfigError, RunConfig, World
from accel_cuda import CudaConfig, affinity, device, machine
from accel_cuda.device import CudaDevice, verify
from accel_cuda.specs import CHIPS
from accel_testing import Recorder

DEVICE = torch.device("cuda", 0)


def plugin(config: CudaConfig | None = None, *, offers: set[str] | None = None, world: int = 1) -> CudaDevice:
    run: Any = SimpleNamespace(world=World(size=world), device=DEVICE)
    made = CudaDevice(config, run)
    made.below = SimpleNamespace(
        select_device=lambda _: DEVICE, capabilities=lambda _: frozenset(offers or {"bf16", "fp16", "fp8"})
    )
    return made


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """torch's switches of this process, as they were."""
    cudnn = torch.backends.cudnn
    before = (torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    yield
    torch.set_float32_matmul_precision(before[0])
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before[1:]
    device._live.clear()


@pytest.mark.parametrize(
    ("chip", "able"), [((8, 9), {"bf16", "fp16", "fp8"}), ((8, 6), {"bf16", "fp16"}), ((7, 5), {"fp16"})]
)
def test_bf16_and_fp8_depend_on_the_chip(cuda: Recorder, chip: tuple[int, int], able: set[str]) -> None:
    cuda.answers("get_device_capability", chip)

    assert plugin().capabilities(DEVICE) == able
    assert cuda.calls == [("get_device_capability", (DEVICE,))]


@pytest.mark.parametrize(
    ("chip", "able"), [("gfx942:sramecc+:xnack-", {"bf16", "fp16", "fp8"}), ("gfx90a", {"bf16", "fp16"})]
)
def test_fp8_depends_on_amds_chip(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch, chip: str, able: set[str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    cuda.answers("get_device_properties", SimpleNamespace(gcnArchName=chip))

    assert plugin().capabilities(DEVICE) == able


@pytest.mark.parametrize(("chip", "usable"), [("gfx90a:xnack-", True), ("gfx1100", False)])
def test_a_chip_of_amd_that_torch_has_no_code_for_is_told(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch, chip: str, usable: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    cuda.answers("is_available", answer=True)
    cuda.answers("get_device_properties", SimpleNamespace(gcnArchName=chip))
    cuda.answers("get_arch_list", ["gfx90a", "gfx942"])

    assert (verify() is None) == usable


def test_a_torch_without_nccl_is_an_error_that_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)

    made = plugin()
    made.run.world = World(size=2)
    (reason,) = made.refuse(RunConfig())
    assert "set process_group.backend: gloo" in reason


def settings() -> tuple[str, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic


def test_switches_are_set_when_the_device_is_selected() -> None:
    run = plugin(CudaConfig(tf32=True, cudnn_benchmark=True, deterministic=True))

    assert run.select_device(World()) == DEVICE
    assert settings() == ("high", True, True, True)


def test_products_of_16_bits_add_up_as_asked() -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    try:
        plugin(CudaConfig(reduced_precision_reduction=False)).select_device(World())

        assert products.allow_bf16_reduced_precision_reduction is False
        assert products.allow_fp16_reduced_precision_reduction is False
    finally:
        products.allow_bf16_reduced_precision_reduction = before[0]
        products.allow_fp16_reduced_precision_reduction = before[1]


def test_switches_nobody_named_stay_as_they_were() -> None:
    before = settings()
    run = plugin(CudaConfig())
    run.select_device(World())

    assert settings() == before


@pytest.mark.parametrize(("variables", "warned"), [(["PYTORCH_CUDA_ALLOC_CONF"], True), ([], False)])
def test_an_option_that_may_come_too_late_is_told(
    cuda: Recorder, caplog: pytest.LogCaptureFixture, variables: list[str], warned: bool
) -> None:
    cuda.answers("is_initialized", answer=True)
    run = plugin(CudaConfig(expandable_segments=True))
    run.run.environment = variables

    run.select_device(World())

    assert ("make the Accelerator first" in caplog.text) == warned


def test_tf32_is_off_where_a_script_has_switched_it_on_for_all_by_the_newer_name(run_command) -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch has the older names alone")
    code = (
        "import torch; from accel_cuda import CudaConfig, device; torch.backends.fp32_precision = 'tf32';"
        "device._set_switches(CudaConfig(tf32=False)); cudnn = torch.backends.cudnn;"
        "print(cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cudnn.allow_tf32, device._uses_tf32())"
    )  # the newer names have no way back: in a process of its own
    result = run_command(
        [sys.executable, "-W", "ignore", "-c", code], check=False, capture_output=True, text=True
    )

    assert result.stdout.split() == ["ieee", "ieee", "False", "False"], result.stderr


def test_tf32_can_be_switched_off() -> None:
    run = plugin(CudaConfig(tf32=False))
    run.select_device(World())

    assert settings()[:2] == ("highest", False)


def test_two_runs_of_a_process_cannot_set_one_switch_differently() -> None:
    first, second = plugin(CudaConfig(tf32=True)), plugin(CudaConfig(tf32=False))
    first.select_device(World())

    with pytest.raises(ConfigError, match="cuda.tf32 is False in this run and True in another run"):
        second.select_device(World())
    first.run_ended()
    assert second.select_device(World()) == DEVICE


# -- verify --------------------------------------------------------------------------------------


def test_a_gpu_that_torch_cannot_use_is_told_with_the_driver(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.answers("is_available", answer=False)
    monkeypatch.setattr(machine, "driver_version", lambda: "390.1")

    assert "finds no usable GPU (driver 390.1)" in (verify() or "")


@pytest.mark.parametrize(
    ("chip", "usable"), [((8, 0), True), ((8, 6), True), ((9, 0), True), ((6, 1), False), ((12, 0), False)]
)
@pytest.mark.parametrize("portable", ["compute_90", "compute_90a"])
def test_a_chip_that_torch_has_no_code_for_is_told(
    cuda: Recorder, chip: tuple[int, int], usable: bool, portable: str
) -> None:
    cuda.answers("is_available", answer=True)
    cuda.answers("get_device_capability", chip)
    cuda.answers("get_arch_list", ["sm_75", "sm_80", "sm_90a", portable])

    usable = usable or (portable == "compute_90" and chip > (9, 0))  # the driver compiles that
    assert (verify() is None) == usable


# -- peaks ---------------------------------------------------------------------------------------


def peaks(cuda: Recorder, name: str, gib: float, units: int = 132) -> dict[str, Any]:
    about = SimpleNamespace(name=name, total_memory=round(gib * 2**30), multi_processor_count=units)
    cuda.answers("get_device_properties", about)
    return dict(plugin().device_specs(DEVICE))


def test_the_peaks_of_a_chip_are_its_data_sheets_without_sparsity(cuda: Recorder) -> None:
    plugin(CudaConfig(tf32=False)).select_device(World())

    assert peaks(cuda, "NVIDIA H200", 139.8) == {
        "flops": {
            "float64": 67e12,
            "float32": 67e12,
            "bfloat16": 989.5e12,
            "float16": 989.5e12,
            "float8": 1979e12,
        },
        "memory": 141 * 2**30,
        "bandwidth": 4.8e12,
        "source": "NVIDIA H200 Tensor Core GPU data sheet: nvidia.com/en-us/data-center/h200",
    }


def test_a_figure_that_no_paper_states_is_left_out(cuda: Recorder) -> None:
    found = peaks(cuda, "Tesla T4", 14.6, 40)

    assert found["flops"] == {"float32": 8.1e12, "float16": 65e12}
    assert "bandwidth" not in found


@pytest.mark.parametrize(
    ("name", "gib", "units"),
    [
        ("NVIDIA H200 MIG 3g.71gb", 69.5, 60),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, 76),
        ("NVIDIA GeForce RTX 4090 D", 24.0, 114),
        ("NVIDIA GeForce RTX 3080", 12.0, 70),  # the one of 10 GB is another chip
        ("AMD Instinct MI300X", 24.0, 38),  # an eighth of one
        ("AMD Instinct MI300X", 192.0, 38),
        ("AMD Radeon Graphics", 192.0, 304),
        ("NVIDIA H2000", 141.0, 132),
    ],
)
def test_nothing_is_guessed_of_other_chips_and_of_parts(
    cuda: Recorder, name: str, gib: float, units: int
) -> None:
    assert peaks(cuda, name, gib, units) == {}


@pytest.mark.parametrize(("tf32", "peak"), [(True, 156e12), (False, 19.5e12)])
def test_float32_is_that_of_tf32_where_it_is_switched_on(cuda: Recorder, tf32: bool, peak: float) -> None:
    plugin(CudaConfig(tf32=tf32)).select_device(World())

    assert peaks(cuda, "NVIDIA A100-SXM4-80GB", 79.3, 108)["flops"]["float32"] == peak


def test_float32_has_no_peak_where_only_convolutions_use_tf32(cuda: Recorder) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True  # both are torch's own defaults

    assert "float32" not in peaks(cuda, "NVIDIA A100-SXM4-80GB", 79.3, 108)["flops"]
    assert peaks(cuda, "Tesla V100-SXM2-16GB", 15.8, 80)["flops"]["float32"] == 15.7e12, "it has no TF32"


def test_float16_has_no_peak_where_products_add_up_in_16_bits(cuda: Recorder) -> None:
    products = torch.backends.cuda.matmul
    try:
        products.allow_fp16_accumulation = True

        assert "float16" not in peaks(cuda, "NVIDIA GeForce RTX 4090", 23.6, 128)["flops"]
    finally:
        products.allow_fp16_accumulation = False
    assert peaks(cuda, "NVIDIA GeForce RTX 4090", 23.6, 128)["flops"]["float16"] == 165.2e12


def test_switches_that_the_older_names_cannot_tell_leave_float32_out(
    cuda: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixed:
        allow_fp16_accumulation = False

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mixed")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Mixed())

    assert "float32" not in peaks(cuda, "NVIDIA A100-SXM4-80GB", 79.3, 108)["flops"]


@pytest.mark.parametrize("name", CHIPS)
def test_each_row_has_a_source_and_figures_that_fit_one_another(name: str) -> None:
    row = CHIPS[name]
    narrow = row.bfloat16 or row.float16

    assert row.source.startswith(("NVIDIA ", "AMD "))
    assert row.float32 is not None
    assert narrow is not None
    assert row.float16 in (row.bfloat16, narrow)
    # Without sparsity each dtype of half the bits is twice as fast, and TF32 half as fast as bfloat16.
    assert row.float8 is None or row.float8 == pytest.approx(2 * narrow, rel=0.02)
    assert row.tf32 is None or row.tf32 == pytest.approx(narrow / 2, rel=0.02)
    assert row.float64 is None or row.float64 <= row.float32 <= narrow


# -- affinity ------------------------------------------------------------------------------------


@pytest.fixture
def pci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: Recorder) -> Path:
    """The kernel's PCI tree with one GPU at 0000:3b:00.0."""
    cuda.answers("get_device_properties", SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0))
    monkeypatch.setattr(affinity, "PCI_DEVICES", tmp_path)
    affinity.set_numa_affinity.cache_clear()
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    return folder / "local_cpulist"


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    made: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: made.append(set(cpus)))
    return made


def test_a_process_is_pinned_to_the_usable_cpus_nearest_its_gpu(pci: Path, pinned: list[set[int]]) -> None:
    pci.write_text("2-3,8-11\n")

    plugin(CudaConfig(numa_affinity=True)).select_device(World())

    assert pinned == [{2, 3, 8}]


def test_nothing_is_pinned_unless_asked(pci: Path, pinned: list[set[int]]) -> None:
    pci.write_text("2-3\n")

    plugin().select_device(World())

    assert pinned == []


def test_setting_is_done_once_and_overriding_each_time(pci: Path, pinned: list[set[int]]) -> None:
    pci.write_text("2-3\n")
    affinity.set_numa_affinity(0)
    affinity.set_numa_affinity(0)
    affinity.override_numa_affinity(0)

    assert pinned == [{2, 3}, {2, 3}]


@pytest.mark.parametrize("cpus", [None, "\n", "64-127\n"], ids=["unknown", "empty", "not ours"])
def test_where_no_usable_cpu_is_near_nothing_changes_and_it_is_said(
    pci: Path, pinned: list[set[int]], caplog: pytest.LogCaptureFixture, cpus: str | None
) -> None:
    if cpus is not None:
        pci.write_text(cpus)

    affinity.override_numa_affinity(0)

    assert pinned == []
    assert "CPU affinity is left as it is" in caplog.text


def test_verbose_says_which_cpus(pci: Path, pinned: list[set[int]], caplog: pytest.LogCaptureFixture) -> None:
    pci.write_text("2-3\n")
    caplog.set_level("INFO")

    affinity.override_numa_affinity(0, verbose=True)

    assert "local rank 0 is pinned to 2 CPUs: [2, 3]" in caplog.text


# -- reports -------------------------------------------------------------------------------------


def test_the_report_works_without_a_run_and_without_a_gpu(cuda: Recorder) -> None:
    cuda.answers("is_available", answer=False)

    report = device.environment_report()

    assert report["CUDA of torch"] == str(torch.version.cuda)
    assert {"CUDA driver", "CUDA_VISIBLE_DEVICES"} <= report.keys()


def test_the_report_lists_each_gpu(cuda: Recorder) -> None:
    cuda.answers("is_available", answer=True)
    cuda.answers("device_count", 1)
    about = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * 2**30)
    cuda.answers("get_device_properties", about)

    assert device.environment_report()["GPU 0"] == "NVIDIA H200, sm_90, 140.0 GiB"
