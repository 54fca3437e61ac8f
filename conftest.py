"""Make the helper modules beside the tests importable by their bare names.

With `--import-mode=importlib` names of test files may repeat across packages, and pytest adds no folder to
the import path. The root itself stays off the path: tests import the installed packages, not the checkout.
With `consider_namespace_packages` a test file has the name that these folders give it, so that a process of
a test finds what is defined there.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent
FILES = [file for tests in ("tests", "*/*/tests") for file in ROOT.glob(f"{tests}/**/*.py")]

# Folders without tests are not for everybody: they hold stand-ins for vendors' libraries, for example.
sys.path[:0] = sorted({str(file.parent) for file in FILES if file.name.startswith(("test_", "conftest"))})

LEFT_OUT = pytest.StashKey[Counter[str]]()
STARTS = {"process", "command", "hosts", "kit"}
"""Marks of tests that start processes; the fixtures of accel-testing set them."""
PYTHON = re.compile(r"python|accel|torchrun|pytest")
_starts_nothing: list[str] = []
"""The running test, if it has none of these marks."""


def watch(event: str, about: tuple[Any, ...]) -> None:
    """Refuse a Python that a test starts without a fixture, and so without a mark."""
    if event == "subprocess.Popen" and _starts_nothing and PYTHON.match(Path(str(about[0])).name):
        raise AssertionError(
            f"{_starts_nothing[0]} starts {about[0]} and has no mark for it\n"
            "take run_command, start_command or accel: fixtures of accel-testing, which mark the test"
        )


sys.addaudithook(watch)


def lacking(item: pytest.Item) -> set[str]:
    """Return the distributions that a test needs and that are not installed."""
    named = {name for mark in item.iter_markers("needs") for name in mark.args}
    return {name for name in named if not is_installed(name)}


@cache
def is_installed(distribution: str) -> bool:
    """Return True if a distribution of this name is installed."""
    return any(metadata.distributions(name=distribution))


def mark_variants(items: list[pytest.Item]) -> None:
    """Mark the variants of a test as `full` that its mark `by_default` does not name."""
    variants: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("by_default"):
            test, _, variant = item.nodeid.removesuffix("]").partition("[")
            variants.setdefault(test, {})[variant] = item
    for test, found in variants.items():
        mark = next(iter(found.values())).get_closest_marker("by_default")
        named = mark.args if mark is not None and mark.args else (next(iter(found)),)
        if len(found) > 1 and (unknown := {*named} - {*found}):
            raise pytest.UsageError(
                f"{test}: by_default names {sorted(unknown)}, the variants are {[*found]}"
            )
        for variant, item in found.items():
            if len(found) > 1 and variant not in named:
                item.add_marker("full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests whose libraries are not here, which a summary counts; hosts are for `full`."""
    mark_variants(items)
    for item in items:
        if "make_hosts" in getattr(item, "fixturenames", ()):
            item.add_marker("full")
    without = {item: sorted(lack) for item in items if (lack := lacking(item))}
    if without:
        items[:] = [item for item in items if item not in without]
        config.hook.pytest_deselected(items=[*without])
    config.stash[LEFT_OUT] = Counter(" and ".join(lack) for lack in without.values())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say which tests were left out for want of what."""
    for lack, count in config.stash.get(LEFT_OUT, Counter()).items():
        terminalreporter.write_line(f"left out, as {lack} is not installed here: {count}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note a test without such a mark while it runs."""
    if STARTS.isdisjoint(mark.name for mark in item.iter_markers()):
        _starts_nothing.append(item.nodeid)
    try:
        return (yield)
    finally:
        _starts_nothing.clear()
