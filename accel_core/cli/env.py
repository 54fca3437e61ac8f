"""`accel env`: facts that a maintainer asks for first, to paste into a bug report."""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from typing import Final

import click

from accel_core._version import __version__
from accel_core.cli.plugins import print_listing
from accel_core.cli.terminal import say
from accel_core.config.resolve import find_file
from accel_core.contract.options import MASK, may_be_secret
from accel_core.plugins.discovery import Record, discover, load

VARIABLES: Final = tuple("ACCEL RANK LOCAL_ WORLD_SIZE MASTER_ OMP_NUM TORCH PYTORCH GLOO USE_LIBUV".split())  # noqa: SIM905
"""Prefixes of variables that change how a run behaves. Other variables may hold secrets."""


@click.command()
def env() -> None:
    """Describe this machine and what is installed, for bug reports."""
    variables = {name: text for name, text in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    facts = {
        "accel-core": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "config": find_file(None) or "no file",
    }
    say(*(f"{name}: {value}" for name, value in facts.items()))
    say(*(f"{name}={MASK if may_be_secret(name) else text}" for name, text in variables.items()), "")
    discovery = discover()
    print_listing(discovery, everything=True)
    reports = {"torch": _torch}
    for record in discovery.of("device"):  # other slots describe no hardware, and are slow to import
        if record.status == "available":
            reports[record.name] = partial(_report, record)
    for name, report in reports.items():
        # A vendor's library may end or hang the process, so each line is printed before the next report.
        print(f"{name} ... ", end="", flush=True)
        try:
            say(report())
        except (Exception, SystemExit) as error:  # a vendor's code may raise anything
            say(f"{type(error).__name__}: {error}")


def _torch() -> str:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = f"{torch.accelerator.device_count()} x {kind}" if kind else "no accelerator"
    return f"{torch.__version__}, {devices}"


def _report(record: Record) -> str:
    """Return the environment report that a device's card names, as one line; "ok" if it is empty."""
    assert record.card is not None
    path = record.card.environment_report
    lines = load(record, path)() if path else {}
    return "; ".join(f"{key}: {value}" for key, value in lines.items()) or "ok"
