"""The machine's GPUs, from files and the environment; no torch, no Intel library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import install_hint

if TYPE_CHECKING:
    from accel_core import RunConfig
    from accel_xpu.config import XpuConfig

__all__ = [
    "contradicted",
    "cpus_near",
    "gpu_count",
    "gpus",
    "probe",
    "probe_ipex",
    "torch_is_built_for_xpu",
    "visible_devices",
]

VISIBLE = "ZE_AFFINITY_MASK"
FILTER = "ONEAPI_DEVICE_SELECTOR"
"""Hides devices from SYCL, by rules of its own."""
FLOAT32 = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""oneDNN's names for the type that float32 may become. The first set counts."""
INTEL = "0x8086"
ROOT = Path("/")
"""Root of /sys and /dev; tests use a tree of their own."""


def probe() -> str | None:
    """None if an Intel GPU can be expected here, else why not."""
    built = torch_is_built_for_xpu()
    if built is None:
        return "torch is not installed"
    if not built:
        return "torch is not built for Intel GPUs; install its XPU build (pytorch.org/get-started)"
    if os.name != "posix":
        return None  # the driver is asked later: there are no such files here
    found = gpus()
    if not found:
        return "no Intel GPU is known to the kernel (/sys/class/drm); is its driver, i915 or xe, loaded?"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in found):
        return f"{found[0]} may not be opened by this user; add it to the group that owns it (render)"
    if os.environ.get(VISIBLE) == "":
        return f"{VISIBLE}='' hides every GPU"
    return None


def probe_ipex() -> str | None:
    """None if intel-extension-for-pytorch loads beside this torch, else why not."""
    extension, torch = _version("intel-extension-for-pytorch"), _version("torch")
    if extension is None:
        return f"intel-extension-for-pytorch is not installed; {install_hint('backends/xpu[ipex]')}"
    if torch is None or torch.split(".")[:2] != extension.split(".")[:2]:
        return (
            f"intel-extension-for-pytorch {extension} was built for another torch than {torch};"
            f" the pair is installed by: {install_hint('backends/xpu[ipex]')}"
        )
    return None


def torch_is_built_for_xpu() -> bool | None:
    """Return True if the installed torch has code for Intel GPUs; None without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    return re.search(r"^xpu\b[^=]*= *['\"]", text, re.MULTILINE) is not None


def gpus() -> list[Path]:
    """Return the device nodes of Intel's GPUs, integrated ones too."""
    nodes = sorted((ROOT / "sys/class/drm").glob("renderD*"))
    vendors = {node.name: node / "device/vendor" for node in nodes}
    return [
        ROOT / "dev/dri" / name
        for name, vendor in vendors.items()
        if vendor.exists() and vendor.read_text().strip() == INTEL
    ]


def gpu_count() -> int | None:
    """Return the number of devices that torch finds; None if only the driver knows.

    torch takes the discrete GPUs that Level Zero lists, else the integrated one (c10/xpu/XPUFunctions.cpp).
    A GPU of several tiles is one device or several, by ZE_FLAT_DEVICE_HIERARCHY and by its driver.
    """
    found = [node for node in gpus() if os.access(node, os.R_OK | os.W_OK)]
    if os.name != "posix" or FILTER in os.environ:
        return None
    if any(_tiles(node) != 1 for node in found) or (len(found) > 1 and any(map(_may_be_integrated, found))):
        return None
    mask = os.environ.get(VISIBLE)
    entries = [] if mask is None else [entry.strip() for entry in mask.split(",") if entry.strip()]
    if not all(entry.isdecimal() for entry in entries):
        return None
    return len(found) if mask is None else len({int(entry) for entry in entries} & {*range(len(found))})


def _tiles(node: Path) -> int | None:
    """Return the number of a GPU's tiles; None where the kernel does not tell.

    The driver xe has a directory for each, i915 one for each GT, of which a tile has one or two.
    """
    about = ROOT / "sys/class/drm" / node.name / "device"
    of_xe = [*about.glob("tile[0-9]*")]
    of_i915 = [*about.glob("drm/card*/gt/gt[0-9]*")]
    return len(of_xe or of_i915) or None


def _may_be_integrated(node: Path) -> bool:
    """Return whether a GPU is on the CPU's bus, as some of virtual machines are too."""
    address = (ROOT / "sys/class/drm" / node.name / "device").resolve().name
    return address.split(":")[1:2] in (["00"], [])


def cpus_near(uuid: bytes) -> set[int]:
    """Return the CPUs nearest the GPU with this UUID; empty where that is unknown.

    Level Zero's UUID, little-endian: vendor, device, revision, PCI domain (2 bytes each), bus, device,
    function (1 each), padding, sub-device (intel/compute-runtime, generateUuidFromPciBusInfo).
    """
    if len(uuid) != 16 or int.from_bytes(uuid[:2], "little") != int(INTEL, 16):
        return set()
    domain, (bus, device, function) = int.from_bytes(uuid[6:8], "little"), uuid[8:11]
    address = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    file = ROOT / "sys/bus/pci/devices" / address / "local_cpulist"
    parts = file.read_text().strip().split(",") if file.exists() else []
    ends = [part.partition("-") for part in parts if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def contradicted(options: XpuConfig) -> Iterator[str]:
    """Yield why options do not hold: a variable of the user says otherwise, and wins.

    torch states no mode for convolutions without TF32 (ATen/native/mkldnn/xpu, apply_tf32_if_allowed),
    and oneDNN takes the variable's, in whichever case it is written.
    """
    name = next((name for name in FLOAT32 if os.environ.get(name)), FLOAT32[0])
    value = os.environ.get(name, "")
    overrules = {None: (), False: ("bf16", "f16", "tf32", "any"), True: ("bf16", "f16", "any")}[options.tf32]
    if value.lower() in overrules:
        yield (
            f"xpu.tf32 is {options.tf32}, but oneDNN reads {name}={value!r} for convolutions\n"
            "unset the variable, or leave the option out"
        )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def visible_devices(config: RunConfig) -> int | None:
    """Return the number of devices that a process of this environment sees."""
    return gpu_count()
