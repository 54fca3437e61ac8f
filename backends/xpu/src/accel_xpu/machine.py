"""What this machine has, from files and the environment alone: no torch, no Intel library."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

__all__ = ["gpus", "probe", "torch_is_built_for_xpu"]

VISIBLE = "ZE_AFFINITY_MASK"
INTEL = "0x8086"
ROOT = Path("/")
"""Where /sys and /dev are; tests have a tree of their own."""


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


def torch_is_built_for_xpu() -> bool | None:
    """Whether the installed torch has code for Intel GPUs; None if there is no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    return re.search(r"^xpu\b[^=]*= *['\"]", text, re.MULTILINE) is not None


def gpus() -> list[Path]:
    """The device nodes of Intel's GPUs, integrated ones too."""
    nodes = sorted((ROOT / "sys/class/drm").glob("renderD*"))
    vendors = {node.name: node / "device/vendor" for node in nodes}
    return [
        ROOT / "dev/dri" / name
        for name, vendor in vendors.items()
        if vendor.exists() and vendor.read_text().strip() == INTEL
    ]
