"""A device in pure Python, for machines without an accelerator.

`SimulatedDevice` is an ordinary device plugin with an ordinary card. It is declared by no installed
distribution, so that nobody meets it by accident: `write_distribution` declares it, in a folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from accel_core import API_VERSION, Card

__all__ = ["CARD", "DISTRIBUTION", "declare", "write_distribution"]

DISTRIBUTION: Final = "accel-simulated"

CARD: Final = Card(
    name="sim",
    slot="device",
    summary="The simulated device of the conformance kit: CPU memory behind torch's PrivateUse1 type.",
    api_version=API_VERSION,
    offers={"bf16", "fp16", "float64", "memory_stats", "rng", "process_per_device", "collectives.torch"},
    torch_device="sim",
    communication_backend="simccl",
    implementation="accel_testing.simulated.plugin:SimulatedDevice",
)


def write_distribution(
    folder: Path,
    name: str = DISTRIBUTION,
    entry_points: str | None = None,
    *,
    version: str = "0.1",
    requires: Sequence[str] = ("accel-core",),
) -> None:
    """Declare plugins by metadata in `folder`, which has to be on the path.

    `entry_points` is the text of an entry_points.txt; without it the simulated device is declared.
    """
    entry_points = entry_points or f"[accel_core.device]\n{CARD.name} = {__name__}:CARD\n"
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(entry_points)


def declare(folder: Path) -> None:
    """Declare the simulated device to this process and its children, in `folder`."""
    write_distribution(folder)
    sys.path.insert(0, str(folder))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([inherited] if inherited else [])])
