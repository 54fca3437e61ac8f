"""The machine's AMD GPUs, read from files and the environment without torch or a ROCm library."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

__all__ = ["gpu_count", "probe"]

RUNTIME = "ROCR_VISIBLE_DEVICES"
"""Hides devices from the runtime below HIP. HIP numbers the remaining devices from 0."""
NODES = "sys/class/kfd/kfd/topology/nodes"


def probe(root: Path) -> str | None:
    """Return the reason why no AMD GPU can be used here; None if one can be expected."""
    driver = root / "dev/kfd"
    if not driver.exists():
        return "torch is a ROCm build, but the amdgpu driver is not loaded (there is no /dev/kfd)"
    if not os.access(driver, os.R_OK | os.W_OK):
        return "/dev/kfd may not be opened by this user; add it to the group that owns it (render)"
    if _node_count(root) == 0:
        return "the amdgpu driver is loaded, but this machine or container is given no GPU (/dev/dri)"
    if gpu_count(root) == 0:
        masks = [name for name in (RUNTIME, visible()) if name in os.environ]
        return f"{' and '.join(f'{name}={os.environ[name]!r}' for name in masks)} hides every GPU"
    return None


def visible() -> str:
    """Return the variable from which HIP takes its visible devices: its own, else CUDA's."""
    return "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"


def gpu_count(root: Path) -> int:
    """Return the number of GPUs that a process of this environment sees.

    For the rules see https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html.
    """
    in_runtime = _visible_count(os.environ.get(RUNTIME), _node_count(root))
    return _visible_count(os.environ.get(visible()), in_runtime)


def _node_count(root: Path) -> int:
    """Return the number of the kernel's nodes that are GPUs with a device file here."""
    texts = []
    for file in (root / NODES).glob("*/properties"):
        # Reading the node of a GPU that this container is not given raises EPERM (node_show in
        # kfd_topology.c).
        with suppress(OSError):
            texts.append(file.read_text())
    nodes = [dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)) for text in texts]
    return sum(
        node.get("simd_count", "0") != "0"
        and (root / f"dev/dri/renderD{node.get('drm_render_minor')}").exists()
        for node in nodes
    )


def _visible_count(mask: str | None, present: int) -> int:
    """Return the number of the mask's entries before the first that names no device."""
    if mask is None:
        return present
    entries = [entry.strip() for entry in mask.split(",")]
    valid = takewhile(lambda entry: entry.startswith("GPU-") or _index(entry) < present, entries)
    return min(len(set(valid)), present)


def _index(entry: str) -> float:
    return int(entry) if entry.isdecimal() else float("inf")
