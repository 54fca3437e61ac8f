"""The machine's NVIDIA GPUs, read from files and the environment without torch or a CUDA library.

A torch for ROCm calls its devices `cuda` too; module `rocm` reads AMD's GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cuda import rocm

if TYPE_CHECKING:
    from accel_core import RunConfig, World
    from accel_cuda.config import CudaConfig

__all__ = [
    "conflicts",
    "driver_version",
    "gpu_count",
    "lacks_peer_access",
    "launch_environment",
    "probe",
    "torch_build",
    "visible_devices",
]

VISIBLE = "CUDA_VISIBLE_DEVICES"
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
DETERMINISTIC = (":4096:8", ":16:8")
"""Values with which cuBLAS gives the same result each time (see torch.use_deterministic_algorithms)."""
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""Options of the allocator; every torch since 2.8 reads this variable at its first allocation."""
ALLOCATOR_VARIABLES = (ALLOCATOR, "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch reads only the first of these variables that is set."""
ROOT = Path("/")
"""Root of /proc and /dev; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why no GPU can be used here; None if one can be expected."""
    build = torch_build()
    if build is None:
        return "torch is not installed"
    if build == "hip":
        return rocm.probe(ROOT)
    if build != "cuda":
        return "torch is a CPU build; install one with CUDA (pytorch.org/get-started)"
    if driver_version() is None:
        return "no NVIDIA driver is loaded (there is neither /proc/driver/nvidia nor /dev/dxg)"
    if os.environ.get(VISIBLE) is not None and gpu_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every GPU"
    if gpu_count() == 0:
        return "the NVIDIA driver is loaded, but this machine or container is given no GPU (no /dev/nvidia0)"
    return None


def torch_build() -> str | None:
    """Return `cuda`, `hip` or `cpu`, for which the installed torch was built; None without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # Wheels, conda packages and vendors' images differ in their version numbers; all have this file.
    text = Path(spec.origin).with_name("version.py").read_text()
    for build in ("cuda", "hip"):
        if re.search(rf"^{build}\b[^=]*= *['\"]", text, re.MULTILINE):
            return build
    return "cpu"


def driver_version() -> str | None:
    """Return the version of the kernel module; "unknown" under WSL; None without a driver."""
    file = ROOT / "proc/driver/nvidia/version"
    if file.exists():
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text())
        return found[0] if found else "unknown"
    return "unknown" if (ROOT / "dev/dxg").exists() else None


def gpu_count() -> int:
    """Return the number of GPUs that a process of this environment sees."""
    visible = os.environ.get(VISIBLE)
    # Under WSL GPUs have no device files; such a machine is taken to have one GPU.
    present = len(list((ROOT / "dev").glob("nvidia[0-9]*"))) or int((ROOT / "dev/dxg").exists())
    if visible is None:
        return present
    # The rules are torch's (torch.cuda._parse_visible_devices): numbers, or names of one kind, up to the
    # first invalid entry. A duplicate hides all GPUs.
    entries = visible.split(",")
    kind = next((kind for kind in ("GPU-", "MIG-") if visible.startswith(kind)), None)
    if kind is None:
        numbers = [re.match(r"\s*\+?(\d+)", entry) for entry in entries]
        entries = [str(int(number[1])) for number in takewhile(bool, numbers) if number]
    else:
        entries = [*takewhile(lambda entry: entry.startswith(kind), entries)]
    if len({*entries}) < len(entries):
        return 0
    if kind is None:
        return len([*takewhile(lambda entry: int(entry) < present, entries)])
    # A process sees one MIG slice, however many are named (NVIDIA's MIG user guide, "CUDA Visible Devices").
    return min(len(entries), 1 if kind == "MIG-" else present)


def lacks_peer_access() -> bool:
    """Return True if the driver reports peer access between GPUs that do not have it.

    Drivers before 550.40.07 do so for several GeForce RTX 40, and NCCL then hangs over P2P and InfiniBand
    (NVIDIA/nccl#1080).
    """
    files = (ROOT / "proc/driver/nvidia/gpus").glob("*/information")
    models = [file.read_text() for file in files]
    parts = [int(part) for part in re.findall(r"\d+", driver_version() or "")]
    return len(models) > 1 and any("RTX 40" in model for model in models) and [0] < parts < [550, 40, 7]


def _is_recorder_off() -> bool:
    """Return True if this torch's flight recorder is off by default, as before 2.11.

    The variable that turns it on is the same in all releases, but later releases warn about it (getCvarInt in
    c10d's FlightRecorder.hpp), so it is set only if it is needed.
    """
    release = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    return release is not None and (int(release[1]), int(release[2])) < (2, 11)


def conflicts(options: CudaConfig) -> Iterator[str]:
    """Yield an error for each option that a variable of the user's environment overrides."""
    if options.expandable_segments is not None:
        wanted = f"expandable_segments:{options.expandable_segments}"
        for name in ALLOCATOR_VARIABLES:
            if wanted not in os.environ.get(name, wanted).replace(" ", ""):
                yield (
                    f"cuda.expandable_segments is {options.expandable_segments}, but torch's allocator reads"
                    f" {name}={os.environ[name]!r}\nadd {wanted} to the variable, or leave the option out"
                )
    if options.deterministic and os.environ.get(WORKSPACE, DETERMINISTIC[0]) not in DETERMINISTIC:
        yield (
            f"cuda.deterministic is set, but with {WORKSPACE}={os.environ[WORKSPACE]!r} results of cuBLAS"
            f" vary\nunset the variable, or set it to {' or '.join(DETERMINISTIC)}"
        )


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return rocm.gpu_count(ROOT) if torch_build() == "hip" else gpu_count()


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the variables that CUDA's libraries read when they are first used."""
    options, wanted = config.plugins.get("cuda"), dict[str, str]()
    if getattr(options, "deterministic", False):
        wanted[WORKSPACE] = DETERMINISTIC[0]
    expandable = getattr(options, "expandable_segments", None)
    if expandable is not None:
        # The user's value under another name is copied, because torch reads only the first name. It contains
        # this option (conflicts) and may contain others.
        values = (os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ)
        wanted[ALLOCATOR] = next(values, f"expandable_segments:{expandable}")
    if world.size > 1:
        # torch's flight recorder: if a collective times out, each rank writes a file with its pending calls.
        wanted["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        if _is_recorder_off():
            wanted["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
        if lacks_peer_access():
            wanted |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return wanted
