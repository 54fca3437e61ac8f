"""`accel env`: facts that a maintainer asks for first, to paste into a report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Final

import click

from accel_core.cli.terminal import say
from accel_core.contract.options import MASK, may_be_secret
from accel_core.plugins.discovery import Record, discover, load

VARIABLES: Final = tuple("ACCEL RANK LOCAL_ WORLD_SIZE MASTER_ OMP_NUM TORCH PYTORCH GLOO USE_LIBUV".split())  # noqa: SIM905
"""Prefixes of variables that change how a run behaves. Others may hold secrets."""


@click.command()
def env() -> None:
    """Describe this machine and what is installed, for bug reports."""
    from accel_core.cli.plugins import listing

    for name, value in _machine():
        say(f"{name:<14} {value}", indent=15)
    discovery = discover()
    print("", *listing(discovery), "", sep="\n")
    # A vendor's library may end or hang the process: what was found by then is out already.
    print("torch ... ", end="", flush=True)
    say(_torch())
    for record in discovery.of("device"):  # others tell nothing of the machine, and are slow to import
        if record.status == "available":
            print(f"{record.name} ... ", end="", flush=True)
            say(_report(record))


def _machine() -> Iterator[tuple[str, str]]:
    from accel_core.config.resolve import find_file

    for name in ("accel-core", "torch"):
        yield name, next((it.version for it in metadata.distributions(name=name)), "not installed")
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} CPUs"
    yield "config", find_file(None) or "no file"
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            yield "environment", f"{name}={MASK if may_be_secret(name) else os.environ[name]}"


def _torch() -> str:
    try:
        import torch
    except (Exception, SystemExit) as error:  # half-installed vendor libraries fail in any way
        return f"cannot be imported: {type(error).__name__}: {error}"
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = f"{torch.accelerator.device_count()} x {kind}" if kind else "no accelerator"
    return f"{torch.__version__}, {devices}"


def _report(record: Record) -> str:
    """Return what the function that its card names says of a device."""
    assert record.card is not None
    path = record.card.environment_report
    try:
        lines = load(record, path)() if path else {}
    except (Exception, SystemExit) as error:  # third-party code of any kind; the report goes on
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"{key}: {value}" for key, value in lines.items()) or "ok"
