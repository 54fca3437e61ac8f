"""`accel env`: what a maintainer asks first, in one piece to paste."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from accel_core.plugins import Card, Record

__all__ = ["env"]

VARIABLES: Final = (
    "ACCEL",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "OMP_NUM",
    "TORCH",
    "PYTORCH",
    "GLOO",
    "USE_LIBUV",
)
"""Prefixes of variables that change how a run behaves. Others may hold secrets."""
REPORT_SECONDS: Final = 60.0


@click.command()
def env() -> None:
    """Describe this machine and what is installed, for bug reports."""
    from accel_core.cli.plugins import table
    from accel_core.plugins import discover

    for name, value in _machine():
        print(f"{name:<14} {value}")
    print()
    print("\n".join(table(discover())), end="\n\n", flush=True)
    _report_in_child()


def _machine() -> Iterator[tuple[str, str]]:
    yield "accel-core", _version("accel-core")
    yield "torch", _version("torch")
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "CPUs", str(os.cpu_count())
    yield (
        "config",
        os.environ.get("ACCEL_CONFIG") or ("accel.yaml" if Path("accel.yaml").exists() else "no file"),
    )
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            yield "environment", f"{name}={os.environ[name]}"


def _version(distribution: str) -> str:
    # Read from metadata, which keeps local parts such as +cpu and imports nothing.
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _report_in_child() -> None:
    code = "from accel_core.cli.env import report; report()"
    try:
        subprocess.run([sys.executable, "-c", code], timeout=REPORT_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        print(f"not finished within {REPORT_SECONDS:g} s; `accel plugins doctor NAME` looks closer")


def report() -> None:
    """The child: what torch and the usable plugins say of themselves, whatever goes wrong."""
    from accel_core.plugins import discover

    print("torch ... ", end="", flush=True)
    try:
        import torch
    except (
        Exception,
        SystemExit,
    ) as error:  # half-installed vendor libraries make torch's import fail in any way
        print(f"cannot be imported: {type(error).__name__}: {error}")
        return
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = f"{torch.accelerator.device_count()} x {found}" if found else "no accelerator"
    print(f"{torch.__version__}, {devices}, {torch.get_num_threads()} threads")
    for record in discover().records:
        if record.status == "available" and record.card is not None and record.slot != "command":
            _report_plugin(record, record.card)


def _report_plugin(record: Record, card: Card) -> None:
    from accel_core.plugins import load

    print(f"{record.name} ... ", end="", flush=True)
    try:
        cls = load(record, card.implementation or "")
        options = load(record, card.config)() if card.config else None
        lines = cls(options, None).environment_report() if hasattr(cls, "environment_report") else {}
    except (Exception, SystemExit) as error:  # a stranger's code, built without a run; the report goes on
        print(f"{type(error).__name__}: {error}")
        return
    print("; ".join(f"{key}: {value}" for key, value in lines.items()) or "ok")
