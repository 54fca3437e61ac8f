"""Running the kit on plugins of this folder, and looking at what it found."""

from __future__ import annotations

import json
import multiprocessing.forkserver  # noqa: F401 - pytester forgets what the inner pytest imports: the
import os
import pkgutil
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - server would be started anew, and torch does not survive a second import

import accel_testing.kit
from accel_core import Card
from accel_testing import Conformance
from accel_testing.simulated import write_distribution

FAULTS = tuple(
    f"{name}:"
    for name in (
        "AttributeError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "PicklingError",
        "SyntaxError",
        "UnboundLocalError",
    )
)
"""How a check ends that found nothing: the broken plugin itself, or the harness, is at fault."""

# Pytester forgets the imports of an inner run. The kit's package would keep the old modules, whose functions
# cannot be pickled: each check of them would fail for any plugin.
for _module in pkgutil.iter_modules(accel_testing.kit.__path__):
    if _module.name.startswith("tasks"):
        import_module(f"accel_testing.kit.{_module.name}")

HERE = str(Path(__file__).parent)


def functions(checks: Collection[str]) -> set[str]:
    """Return the names of the checks' functions, without file and parameters."""
    return {name.partition("::")[2].partition("[")[0] for name in checks}


def describe(found: Conformance) -> str:
    """Return the lines of the kit's output that say what failed."""
    lines = found.output.splitlines()
    return "\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  ")))


def crashes(found: Conformance) -> dict[str, str]:
    """Failed checks that ended by a mistake in the broken plugin or in the harness."""
    return {name: found.reasons[name] for name in found.failed if found.reasons[name].startswith(FAULTS)}


def declare(
    folder: Path, module: str, cards: Mapping[str, Card], distribution: str = "accel-declared", **more: Any
) -> None:
    """A distribution that provides `cards`, attributes of `module` by name."""
    sections: dict[str, list[str]] = {}
    for attribute, card in cards.items():
        sections.setdefault(card.slot, []).append(f"{card.name} = {module}:{attribute}")
    text = "\n".join(f"[accel_core.{slot}]\n" + "\n".join(lines) for slot, lines in sections.items())
    write_distribution(folder, distribution, text + "\n", **more)


def run_kit(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, site: Path, stack: str, *options: str
) -> Conformance:
    """Run the kit in this process, from an empty folder, with the plugins that `site` declares."""
    monkeypatch.setattr(sys, "path", [str(site), HERE, *sys.path])
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), HERE, *([inherited] if inherited else [])]))
    site.mkdir(exist_ok=True)
    report = pytester.path / "report.json"
    ended = pytester.runpytest_inprocess(
        *(
            "--pyargs",
            "accel_testing",
            "--accel-stack",
            stack,
            "--accel-report",
            str(report),
            "-p",
            "no:cacheprovider",
        ),
        *options,
    )
    text = ended.stdout.str()
    assert report.exists(), text + ended.stderr.str()
    return Conformance.of(json.loads(report.read_text()), text)
