"""The machine's NPUs, read from files and the environment without torch or an Ascend library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from accel_core import install_hint

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["chip_count", "find_runtime", "launch_environment", "probe", "visible_devices"]

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
AFFINITY = "CPU_AFFINITY_CONF"
RUNTIME = "libascendcl.so"
ROOT = Path("/")
"""Root of /dev and /usr; tests use a tree of their own."""


def probe() -> str | None:
    """Return the reason why no NPU can be used here; None if one can be expected."""
    vendor, torch = _version("torch_npu"), _version("torch")
    if vendor is None:
        return f"torch_npu is not installed; {install_hint('backends/npu[runtime]')}"
    if torch is None or torch.split(".")[:2] != vendor.split(".")[:2]:
        return (
            f"torch_npu {vendor} was not built for torch {torch}; install torch and torch_npu of one release"
        )
    if find_runtime() is None:
        return (
            f"torch_npu is installed but CANN's {RUNTIME} is not found; install the CANN toolkit,"
            " then source its set_env.sh"
        )
    if not _chips():
        return "CANN is installed, but this machine or container is given no NPU (no /dev/davinci0)"
    if chip_count() == 0:
        return f"{VISIBLE}={os.environ[VISIBLE]!r} hides every NPU"
    return None


def find_runtime() -> Path | None:
    """Return CANN's runtime library from the folders of set_env.sh, else from the default folder."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if home := os.environ.get(variable):
            folders.append(f"{home}/lib64")
    folders.append(str(ROOT / "usr/local/Ascend/ascend-toolkit/latest/lib64"))
    found = (Path(folder, RUNTIME) for folder in filter(None, folders))
    return next((file for file in found if file.exists()), None)


def chip_count() -> int:
    """Return the number of NPUs that a process of this environment sees."""
    present, visible = _chips(), os.environ.get(VISIBLE)
    if visible is None:
        return present
    # torch_npu's rules: ascending numbers up to the first that is not a chip. Any other character ends the
    # list.
    listed = re.match(r"[\d,]*", visible)
    numbers = [int(entry) for entry in takewhile(bool, listed[0].split(",") if listed else ())]
    if numbers != sorted(set(numbers)):
        return 0
    return sum(number < present for number in numbers)


def _chips() -> int:
    return len([node for node in (ROOT / "dev").glob("davinci*") if node.name[7:].isdecimal()])


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def visible_devices(config: RunConfig) -> int:
    """Return the number of devices that a process of this environment sees."""
    return chip_count()


def launch_environment(config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the environment variables that the vendor's library reads when it is imported."""
    affinity = getattr(config.plugins.get("npu"), "cpu_affinity", None)
    return {AFFINITY: affinity} if affinity else {}
