"""Whether a GPU can be expected, told from files within milliseconds and without torch."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_machine import Machine

from accel_core import World
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
    [
        (None, "torch is not installed"),
        ("hip", "ROCm build, but the amdgpu driver is not loaded"),
        ("cpu", "CPU build; install one with CUDA"),
    ],
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
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-5f6a7b1c", 1),
        ("GPU-8932f937,GPU-5f6a7b1c", 2),
        ("MIG-8932f937,MIG-5f6a7b1c", 1),  # a process sees one slice
        ("0,0", 0),
        ("0,1,00", 0),
        ("GPU-5f6a7b1c,GPU-5f6a7b1c", 0),
        ("2gpu,+1,x", 2),
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

    assert machine.visible_devices(config) == count


def test_the_drivers_version_is_read(built: Machine) -> None:
    built.driver("550.54.15")

    assert machine.driver_version() == "550.54.15"


@pytest.fixture
def rocm(built: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a torch for ROCm."""
    monkeypatch.setattr(machine, "torch_build", lambda: "hip")
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return built


def test_amds_gpus_are_usable_under_a_torch_for_rocm(rocm: Machine) -> None:
    rocm.amd(2)

    assert machine.probe() is None


def test_a_container_that_was_given_no_gpu_of_amd_is_told_so(rocm: Machine) -> None:
    rocm.amd(2, given=0)

    assert "is given no GPU" in (machine.probe() or "")


def test_gpus_of_amd_that_the_kernel_does_not_tell_of_are_not_counted(rocm: Machine) -> None:
    rocm.amd(3)
    refused = rocm.root / "sys/class/kfd/kfd/topology/nodes/2/properties"
    refused.unlink()
    refused.mkdir()  # reading it is an error, for root too

    assert machine.probe() is None
    assert machine.visible_devices(None) == 2  # type: ignore[arg-type]


def test_hidden_gpus_of_amd_are_told_with_the_variables(
    rocm: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm.amd(2)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")

    assert machine.probe() == "ROCR_VISIBLE_DEVICES='0' and HIP_VISIBLE_DEVICES='1' hides every GPU"


@pytest.mark.parametrize(
    ("variables", "counted"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,9,1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "2,GPU-deadbeefdeadbeef"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0,2"}, 1),
    ],
)
def test_gpus_of_amd_are_counted_as_hip_counts_them(
    rocm: Machine, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], counted: int
) -> None:
    rocm.amd(4)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config: Any = None

    assert machine.visible_devices(config) == counted


@pytest.mark.parametrize(
    ("models", "driver", "lacking"),
    [
        (("NVIDIA GeForce RTX 4090",) * 2, "545.23.08", True),
        (("NVIDIA GeForce RTX 4090",) * 2, "550.40.07", False),
        (("NVIDIA GeForce RTX 4090",), "545.23.08", False),
        (("NVIDIA H200",) * 2, "545.23.08", False),
    ],
)
def test_gpus_whose_driver_claims_access_between_them_that_they_lack(
    built: Machine, models: tuple[str, ...], driver: str, lacking: bool
) -> None:
    built.driver(driver).models(*models)

    assert machine.lacks_peer_access() is lacking


@pytest.mark.parametrize(
    ("torch", "recorder"), [("2.10.0+cu128", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}), ("2.11.0a0", {})]
)
def test_several_processes_record_what_nccl_waits_for_and_avoid_what_hangs(
    built: Machine, monkeypatch: pytest.MonkeyPatch, torch: str, recorder: dict[str, str]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: torch)
    built.driver("545.23.08").models("NVIDIA GeForce RTX 4080", "NVIDIA GeForce RTX 4080")
    config: Any = SimpleNamespace(plugins={})

    assert machine.launch_environment(config, World(size=2)) == {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        **recorder,
        "NCCL_P2P_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (None, {}),
        (CudaConfig(), {}),
        (CudaConfig(deterministic=True), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (CudaConfig(expandable_segments=True), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (CudaConfig(expandable_segments=False), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}),
    ],
)
def test_options_set_what_libraries_read_when_they_are_first_used(
    options: CudaConfig | None, variables: dict[str, str]
) -> None:
    config: Any = SimpleNamespace(plugins={} if options is None else {"cuda": options})

    assert machine.launch_environment(config, World()) == variables


def test_what_a_user_says_of_the_allocator_by_its_newer_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = "max_split_size_mb:512,expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", theirs)
    config: Any = SimpleNamespace(plugins={"cuda": CudaConfig(expandable_segments=True)})

    # torch reads the older name alone where it is set
    assert machine.launch_environment(config, World()) == {"PYTORCH_CUDA_ALLOC_CONF": theirs}


@pytest.mark.parametrize(
    ("options", "variables", "told"),
    [
        (CudaConfig(), {"PYTORCH_ALLOC_CONF": "x:1", "CUBLAS_WORKSPACE_CONFIG": ":0:0"}, []),
        (CudaConfig(expandable_segments=True), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, []),
        (CudaConfig(expandable_segments=True), {"PYTORCH_ALLOC_CONF": "x:1, expandable_segments: True"}, []),
        (CudaConfig(expandable_segments=True), {"PYTORCH_ALLOC_CONF": "x:1"}, ["PYTORCH_ALLOC_CONF='x:1'"]),
        (
            CudaConfig(expandable_segments=False),
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            ["add expandable_segments:False to the variable"],
        ),
        (CudaConfig(deterministic=True), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, []),
        (
            CudaConfig(deterministic=True),
            {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            ["CUBLAS_WORKSPACE_CONFIG=':0:0'"],
        ),
    ],
)
def test_an_option_that_a_variable_of_the_user_overrides_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: CudaConfig, variables: dict[str, str], told: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    reasons = [*machine.conflicts(options)]

    assert len(reasons) == len(told)
    assert all(words in reason for words, reason in zip(told, reasons, strict=True))


def test_card_config_and_launch_class_import_no_torch(run_command) -> None:
    code = "import sys, accel_cuda.card, accel_cuda.config, accel_cuda.machine; print('torch' in sys.modules)"
    result = run_command([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "False"


def test_the_listing_says_why_it_cannot_be_used_here() -> None:
    record = discover().get("cuda")

    assert record is not None
    assert record.reason == (machine.probe() or "")
    assert record.status == ("available" if machine.probe() is None else "unavailable")
