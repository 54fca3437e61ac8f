"""Whether a GPU can be expected, told from files within milliseconds and without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_machine import Machine

from accel_core.plugins.discovery import discover
from accel_cuda import CudaConfig, machine


def test_a_machine_with_driver_and_gpu_is_usable(built: Machine) -> None:
    built.driver().gpus(1)

    assert machine.probe() is None


def test_without_a_driver_the_reason_names_what_was_looked_for(built: Machine) -> None:
    assert machine.probe() == "no NVIDIA driver is loaded (there is neither /proc/driver/nvidia nor /dev/dxg)"


def test_a_container_that_was_given_no_gpu_is_told_so(built: Machine) -> None:
    built.driver().gpus(0)

    assert "is given no GPU" in (machine.probe() or "")


@pytest.mark.parametrize("value", ["", "-1", "9"])
def test_hidden_gpus_are_told_with_the_variable(
    built: Machine, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    built.driver().gpus(2)
    monkeypatch.setenv(machine.VISIBLE, value)

    assert machine.probe() == f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"


def test_wsl_is_usable_without_the_kernel_module(built: Machine) -> None:
    built.wsl()

    assert machine.probe() is None
    assert machine.gpu_count() == 1


@pytest.mark.parametrize(
    ("version_file", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cpu"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda = '11.8'\nhip = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133'\n", "hip"),
    ],
)
def test_the_build_of_torch_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_file: str, build: str
) -> None:
    (tmp_path / "version.py").write_text(version_file)
    monkeypatch.setattr(machine, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))

    assert machine.torch_build() == build


@pytest.mark.parametrize(
    ("build", "reason"),
    [(None, "torch is not installed"), ("hip", "ROCm build"), ("cpu", "CPU build; install one with CUDA")],
)
def test_a_torch_without_cuda_is_the_reason(
    built: Machine, monkeypatch: pytest.MonkeyPatch, build: str | None, reason: str
) -> None:
    built.driver().gpus(1)
    monkeypatch.setattr(machine, "torch_build", lambda: build)

    assert reason in (machine.probe() or "")


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 4),
        ("0,2", 2),
        ("0,1,7,2", 2),  # CUDA stops at the first that does not exist
        ("0,-1,2", 1),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-5f6a7b1c", 2),
        (" 1 , 3 ", 2),
        ("", 0),
    ],
)
def test_visible_gpus_are_counted_as_cuda_counts_them(
    built: Machine, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    built.driver().gpus(4)
    if visible is not None:
        monkeypatch.setenv(machine.VISIBLE, visible)
    config: Any = None

    assert machine.CudaLaunch().visible_devices(config) == ("CUDA_VISIBLE_DEVICES", count)


def test_the_drivers_version_is_read(built: Machine) -> None:
    built.driver("550.54.15")

    assert machine.driver_version() == "550.54.15"


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (None, {}),
        (CudaConfig(), {}),
        (CudaConfig(deterministic=True), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    ],
)
def test_determinism_sets_what_cublas_reads(options: CudaConfig | None, variables: dict[str, str]) -> None:
    config: Any = SimpleNamespace(plugins={} if options is None else {"cuda": options})
    world: Any = None

    assert machine.CudaLaunch().launch_environment(config, world) == variables


def test_card_config_and_launch_class_import_no_torch() -> None:
    code = "import sys, accel_cuda.card, accel_cuda.config, accel_cuda.machine; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "False"


def test_the_listing_says_why_it_cannot_be_used_here() -> None:
    record = discover().get("cuda")

    assert record is not None
    assert record.reason == (machine.probe() or "")
    assert record.status == ("available" if machine.probe() is None else "unavailable")
