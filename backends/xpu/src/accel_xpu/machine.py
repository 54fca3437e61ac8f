"""The machine's Intel GPUs, read from files and the environment without torch or an Intel library."""

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
    "conflicts",
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
"""Hides devices from SYCL, by rules that only SYCL evaluates."""
FLOAT32 = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""oneDNN's variables for the type in which float32 may be computed. The first that is set counts."""
INTEL = "0x8086"
ROOT = Path("/")
"""Root of /sys and /dev; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why no Intel GPU can be used here; None if one can be expected."""
    built = torch_is_built_for_xpu()
    if built is None:
        return "torch is not installed"
    if not built:
        return "torch is not built for Intel GPUs; install its XPU build (pytorch.org/get-started)"
    if os.name != "posix":
        return None  # other systems have no such files; `verify` asks the driver later
    found = gpus()
    if not found:
        return "no Intel GPU is known to the kernel (/sys/class/drm); is its driver, i915 or xe, loaded?"
    if not any(os.access(node, os.R_OK | os.W_OK) for node in found):
        return f"{found[0]} may not be opened by this user; add it to the group that owns it (render)"
    if os.environ.get(VISIBLE) == "":
        return f"{VISIBLE}='' hides every GPU"
    return None


def probe_ipex() -> str | None:
    """Return the reason why intel-extension-for-pytorch cannot be used with this torch; None if it can."""
    extension, torch = _version("intel-extension-for-pytorch"), _version("torch")
    if extension is None:
        return f"intel-extension-for-pytorch is not installed; {install_hint('backends/xpu[ipex]')}"
    if torch is None or torch.split(".")[:2] != extension.split(".")[:2]:
        return (
            f"intel-extension-for-pytorch {extension} was not built for torch {torch};"
            f" to install the pair: {install_hint('backends/xpu[ipex]')}"
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
    """Return the device files of Intel's GPUs, integrated GPUs included."""
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
    """Return the number of a GPU's tiles; None if the kernel has no such files.

    The driver xe has a directory per tile, i915 a directory per GT; a tile has one or two GTs.
    """
    device = ROOT / "sys/class/drm" / node.name / "device"
    xe_tiles = [*device.glob("tile[0-9]*")]
    i915_gts = [*device.glob("drm/card*/gt/gt[0-9]*")]
    return len(xe_tiles or i915_gts) or None


def _may_be_integrated(node: Path) -> bool:
    """Return True if a GPU is on the CPU's bus; discrete GPUs of virtual machines may be on it too."""
    address = (ROOT / "sys/class/drm" / node.name / "device").resolve().name
    return address.split(":")[1:2] in (["00"], [])


def cpus_near(uuid: bytes) -> set[int]:
    """Return the CPUs nearest the GPU with this UUID; empty if the kernel does not know them.

    Level Zero builds the UUID of vendor, device, revision and PCI domain (2 bytes each, little-endian), bus,
    device and function (1 byte each), padding and sub-device (generateUuidFromPciBusInfo in
    intel/compute-runtime).
    """
    if len(uuid) != 16 or int.from_bytes(uuid[:2], "little") != int(INTEL, 16):
        return set()
    domain, (bus, device, function) = int.from_bytes(uuid[6:8], "little"), uuid[8:11]
    address = f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
    file = ROOT / "sys/bus/pci/devices" / address / "local_cpulist"
    parts = file.read_text().strip().split(",") if file.exists() else []
    ends = [part.partition("-") for part in parts if part]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def conflicts(options: XpuConfig) -> Iterator[str]:
    """Yield an error if a variable of the user's environment overrides the option `tf32`.

    torch passes no mode to oneDNN for convolutions without TF32 (apply_tf32_if_allowed in
    ATen/native/mkldnn/xpu), so oneDNN uses the mode in the variable, in upper or lower case.
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
