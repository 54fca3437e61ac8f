"""AMD's GPUs, from files and the environment; no torch, no ROCm library."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

__all__ = ["gpu_count", "probe"]

RUNTIME = "ROCR_VISIBLE_DEVICES"
"""Hides devices from the runtime below HIP, which numbers the others from 0."""
NODES = "sys/class/kfd/kfd/topology/nodes"


def probe(root: Path) -> str | None:
    """None if an AMD GPU can be expected here, else why not."""
    driver = root / "dev/kfd"
    if not driver.exists():
        return "torch is a ROCm build, but the amdgpu driver is not loaded (there is no /dev/kfd)"
    if not os.access(driver, os.R_OK | os.W_OK):
        return "/dev/kfd may not be opened by this user; add it to the group that owns it (render)"
    if _there(root) == 0:
        return "the amdgpu driver is loaded, but this machine or container is given no GPU (/dev/dri)"
    if gpu_count(root) == 0:
        masks = [name for name in (RUNTIME, visible()) if name in os.environ]
        return f"{' and '.join(f'{name}={os.environ[name]!r}' for name in masks)} hides every GPU"
    return None


def visible() -> str:
    """Return the variable by which HIP hides devices: its own, else CUDA's."""
    return "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"


def gpu_count(root: Path) -> int:
    """Return the number of GPUs that a process of this environment sees.

    By the rules of https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html.
    """
    return _shown(os.environ.get(visible()), _shown(os.environ.get(RUNTIME), _there(root)))


def _there(root: Path) -> int:
    """Count the kernel's nodes that compute and have a device file here."""
    texts = []
    for file in (root / NODES).glob("*/properties"):
        with suppress(
            OSError
        ):  # of a GPU that this container is not given (node_show in kfd_topology.c: EPERM)
            texts.append(file.read_text())
    nodes = [dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)) for text in texts]
    return sum(
        node.get("simd_count", "0") != "0"
        and (root / f"dev/dri/renderD{node.get('drm_render_minor')}").exists()
        for node in nodes
    )


def _shown(mask: str | None, there: int) -> int:
    """Count the entries of a mask up to the first that names no device."""
    if mask is None:
        return there
    entries = [entry.strip() for entry in mask.split(",")]
    named = takewhile(lambda entry: entry.startswith("GPU-") or _index(entry) < there, entries)
    return min(len(set(named)), there)


def _index(entry: str) -> float:
    return int(entry) if entry.isdecimal() else float("inf")
