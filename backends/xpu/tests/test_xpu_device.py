"""The probe on made-up machines, and what the plugin asks of torch.xpu."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_core import RunConfig, World
from accel_testing import Recorder
from accel_xpu import XpuConfig, device, machine
from accel_xpu.device import XpuDevice, verify
from accel_xpu.machine import gpu_count, probe

DEVICE = torch.device("xpu", 0)


def plugin(config: XpuConfig | None = None) -> XpuDevice:
    run: Any = SimpleNamespace(device=DEVICE, world=World())
    made = XpuDevice(config, run)
    made.below = SimpleNamespace(
        select_device=lambda _: DEVICE, capabilities=lambda _: frozenset({"bf16", "fp16", "float64"})
    )
    return made


# -- the probe -----------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a torch for Intel GPUs, and nothing else yet."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "torch_is_built_for_xpu", lambda: True)
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    return tmp_path


def gpu(root: Path, name: str = "renderD128", vendor: str = machine.INTEL) -> Path:
    about, node = root / f"sys/class/drm/{name}/device/vendor", root / f"dev/dri/{name}"
    for file in (about, node):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{vendor}\n")
    return node


def test_a_torch_without_such_code_is_told() -> None:
    assert "torch is not built for Intel GPUs" in (probe() or "")


def test_a_machine_with_an_intel_gpu_is_usable(built: Path) -> None:
    gpu(built)

    assert probe() is None


def test_another_vendors_gpu_does_not_count(built: Path) -> None:
    gpu(built, vendor="0x10de")

    assert "no Intel GPU is known to the kernel" in (probe() or "")


def test_a_gpu_that_may_not_be_opened_is_told_with_the_group(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = gpu(built)
    monkeypatch.setattr(os, "access", lambda path, mode: path != node)

    assert "renderD128 may not be opened by this user; add it to the group" in (probe() or "")


def test_a_mask_that_hides_all_is_told(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(built)
    monkeypatch.setenv(machine.VISIBLE, "")

    assert probe() == "ZE_AFFINITY_MASK='' hides every GPU"


# -- counting ------------------------------------------------------------------------------------


def card(root: Path, number: int, address: str, *, tiles: int = 1, driver: str = "xe") -> Path:
    """A GPU at an address, with its tiles as the driver lists them."""
    device = root / "sys/devices" / address
    names = [f"tile{tile}" for tile in range(tiles)]
    if driver == "i915":
        names = [f"drm/card{number}/gt/gt{tile}" for tile in range(tiles)]
    for name in names:
        (device / name).mkdir(parents=True)
    device.mkdir(parents=True, exist_ok=True)
    (device / "vendor").write_text(f"{machine.INTEL}\n")
    link, node = root / f"sys/class/drm/renderD{128 + number}/device", root / f"dev/dri/renderD{128 + number}"
    for file in (link, node):
        file.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)
    node.touch()
    return node


@pytest.fixture
def cards(built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two discrete GPUs of one tile, one by each driver."""
    monkeypatch.delenv(machine.FILTER, raising=False)
    card(built, 0, "0000:4d:00.0")
    card(built, 1, "0000:9a:00.0", driver="i915")
    return built


@pytest.mark.parametrize(
    ("mask", "count"),
    [(None, 2), ("", 0), ("1", 1), ("0, 1", 2), ("1,1", 1), ("1,7", 1), ("7", 0), ("0.0,1.0", None)],
)
def test_gpus_of_one_tile_are_counted_from_files(
    cards: Path, monkeypatch: pytest.MonkeyPatch, mask: str | None, count: int | None
) -> None:
    if mask is not None:
        monkeypatch.setenv(machine.VISIBLE, mask)

    assert machine.visible_devices(None) == count  # type: ignore[arg-type]


@pytest.mark.parametrize("driver", ["xe", "i915"])
@pytest.mark.parametrize("tiles", [0, 2])
def test_a_gpu_whose_tiles_may_be_devices_is_left_to_torch(cards: Path, tiles: int, driver: str) -> None:
    card(cards, 2, "0000:b3:00.0", tiles=tiles, driver=driver)

    assert gpu_count() is None


def test_an_integrated_gpu_counts_alone_and_is_left_to_torch_beside_others(built: Path) -> None:
    card(built, 0, "0000:00:02.0")
    alone = gpu_count()
    card(built, 1, "0000:4d:00.0")

    assert (alone, gpu_count()) == (1, None)


def test_a_filter_of_sycl_is_left_to_torch(cards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.FILTER, "level_zero:0")

    assert gpu_count() is None


def test_a_gpu_that_this_user_may_not_open_does_not_count(
    cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = card(cards, 2, "0000:b3:00.0")
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)

    assert gpu_count() == 2


# -- the device ----------------------------------------------------------------------------------


def test_a_gpu_that_torch_cannot_use_is_told(xpu: Recorder) -> None:
    xpu.answers("is_available", answer=False)

    assert "finds no usable Intel GPU (ZE_AFFINITY_MASK=" in (verify() or "")


@pytest.mark.parametrize(
    ("bf16", "fp64", "able"),
    [
        (True, True, {"bf16", "fp16", "float64"}),
        (False, True, {"fp16", "float64"}),
        (True, False, {"bf16", "fp16"}),
    ],
)
def test_capabilities_depend_on_the_chip(xpu: Recorder, bf16: bool, fp64: bool, able: set[str]) -> None:
    xpu.answers("is_bf16_supported", bf16)
    xpu.answers("get_device_capability", {"has_fp64": fp64})

    assert plugin().capabilities(DEVICE) == able
    assert ("get_device_capability", (DEVICE,)) in xpu.calls


def test_a_torch_without_xccl_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)

    made = plugin()
    made.run.world = World(size=2)
    (reason,) = made.refuse(RunConfig())
    assert "built without XCCL" in reason


@pytest.mark.parametrize("asked", [True, False])
def test_tf32_is_set_when_the_device_is_selected(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    made: list[bool] = []  # without such a GPU torch does not keep it
    switch = type(torch.backends.mkldnn).__dict__["allow_tf32"]
    monkeypatch.setattr(switch, "setter", made.append)

    plugin(XpuConfig(tf32=asked)).select_device(None)  # type: ignore[arg-type]

    assert made == [asked]


@pytest.mark.parametrize(
    ("asked", "variables", "told"),
    [
        (None, {"ONEDNN_DEFAULT_FPMATH_MODE": "bf16"}, None),
        (False, {}, None),
        (False, {"ONEDNN_DEFAULT_FPMATH_MODE": "strict"}, None),
        (False, {"ONEDNN_DEFAULT_FPMATH_MODE": "bf16"}, "ONEDNN_DEFAULT_FPMATH_MODE='bf16'"),
        (False, {"ONEDNN_DEFAULT_FPMATH_MODE": "TF32"}, "ONEDNN_DEFAULT_FPMATH_MODE='TF32'"),
        (True, {"ONEDNN_DEFAULT_FPMATH_MODE": "tf32"}, None),
        (True, {"ONEDNN_DEFAULT_FPMATH_MODE": "any"}, "ONEDNN_DEFAULT_FPMATH_MODE='any'"),
        (
            True,
            {"ONEDNN_DEFAULT_FPMATH_MODE": "", "DNNL_DEFAULT_FPMATH_MODE": "f16"},
            "DNNL_DEFAULT_FPMATH_MODE='f16'",
        ),
        (True, {"ONEDNN_DEFAULT_FPMATH_MODE": "tf32", "DNNL_DEFAULT_FPMATH_MODE": "f16"}, None),
    ],
)
def test_tf32_that_a_variable_of_the_user_overrules_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None, variables: dict[str, str], told: str | None
) -> None:
    for name in machine.FLOAT32:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    reasons = plugin(XpuConfig(tf32=asked)).refuse(None)  # type: ignore[arg-type]

    assert len(reasons) == (told is not None)
    assert (told or "") in "".join(reasons)


UUID = bytes([0x86, 0x80, 0xD5, 0x0B, 0x2F, 0, 0, 0, 0x9A, 0, 0, 0, 0, 0, 0, 0])


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xpu: Recorder) -> list[set[int]]:
    """GPU 0 is near CPUs 2, 3 and 8, of which this process may use 0 to 5. What it is pinned to."""
    cpus = tmp_path / "sys/bus/pci/devices/0000:9a:00.0/local_cpulist"
    cpus.parent.mkdir(parents=True)
    cpus.write_text("2-3,8\n")
    pinned: list[set[int]] = []
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: pinned.append(cpus), raising=False)
    xpu.answers("get_device_properties", SimpleNamespace(uuid=UUID))
    return pinned


def test_a_process_is_pinned_to_the_cpus_nearest_its_gpu_that_it_may_use(near: list[set[int]]) -> None:
    plugin(XpuConfig(numa_affinity=True)).select_device(World())

    assert near == [{2, 3}]


def test_unless_asked_nothing_is_pinned(near: list[set[int]]) -> None:
    plugin().select_device(World())

    assert near == []


@pytest.mark.parametrize(
    "uuid", [UUID[:8] + bytes(8), bytes(16), b""], ids=["elsewhere", "not Intel's", "none"]
)
def test_where_the_place_is_unknown_nothing_is_pinned_and_that_is_said(
    near: list[set[int]], xpu: Recorder, caplog: pytest.LogCaptureFixture, uuid: bytes
) -> None:
    xpu.answers("get_device_properties", SimpleNamespace(uuid=uuid))

    plugin(XpuConfig(numa_affinity=True)).select_device(World())

    assert near == []
    assert "no usable CPU is known to be near" in caplog.text


def test_a_report_for_maintainers_lists_the_gpus(xpu: Recorder) -> None:
    xpu.answers("device_count", 1)
    xpu.answers("get_device_properties", SimpleNamespace(name="Max 1550", total_memory=2**36))

    assert device.environment_report()["XPU 0"] == "Max 1550, 64.0 GiB"
