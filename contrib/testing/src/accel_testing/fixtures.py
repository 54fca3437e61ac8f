"""Fixtures that start processes. A test that asks for one has its mark, so that `-m` can leave it out.

`pytest -m "not process and not command and not kit"` runs the tests that start nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import pytest

__all__ = ["MARKS"]

MARKS: Final = {
    "run_processes": "process",
    "accel": "command",
    "run_command": "command",
    "start_command": "command",
    "make_hosts": "hosts",
    "conform": "kit",
    "pytester": "kit",
}
"""Fixture -> the mark of the tests that ask for it, directly or through another fixture."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    for line in (
        "process: starts ranks, forked from a server that has loaded torch",
        "command: starts the command accel, or another program",
        "hosts: starts launchers on hosts of their own, which are network namespaces",
        "kit: runs the conformance kit, or another pytest",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by its fixtures, and give each the time that this machine needs."""
    from accel_testing.patience import patience

    usual = float(config.getini("timeout") or 0) if config.pluginmanager.hasplugin("timeout") else 0
    for item in items:
        for mark in sorted({MARKS[name] for name in MARKS.keys() & {*getattr(item, "fixturenames", ())}}):
            item.add_marker(mark)
        own = item.get_closest_marker("timeout")
        seconds = float(own.args[0]) if own is not None and own.args else usual
        if seconds and patience(1) != 1:
            item.add_marker(pytest.mark.timeout(patience(seconds)), append=False)


@pytest.fixture(scope="session")
def run_processes() -> Callable[..., list[Any]]:
    """`accel_testing.run_processes`: call a function in several new processes."""
    from accel_testing.processes import run_processes

    return run_processes


@pytest.fixture(scope="session")
def accel() -> Callable[..., Any]:
    """Run the command `accel`: see `accel_testing.commands.run_accel`."""
    from accel_testing.commands import run_accel

    return run_accel


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Any]:
    """Call `subprocess.run` with a deadline that this machine can keep."""
    from accel_testing.commands import run_command

    return run_command


@pytest.fixture(scope="session")
def start_command() -> Callable[..., Any]:
    """Call `subprocess.Popen`."""
    from accel_testing.commands import start_command

    return start_command


@pytest.fixture(scope="session")
def make_hosts() -> Callable[..., Any]:
    """Make hosts on this machine: see `accel_testing.hosts.make_hosts`. Skips where none can be made."""
    from accel_testing.hosts import make_hosts, missing

    if reason := missing():
        pytest.skip(reason)
    return make_hosts


@pytest.fixture(scope="session")
def conform(pytestconfig: pytest.Config) -> Callable[..., Any]:
    """Run the conformance kit on a stack: see `accel_testing.conform`.

    A line every ten seconds says how far it is, on the terminal of the session.
    """
    from accel_testing.conformance import conform

    terminal = pytestconfig.pluginmanager.getplugin("terminalreporter")
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        if terminal is not None:
            with capture.global_and_fixture_disabled() if capture else nullcontext():
                begun = pytestconfig.get_terminal_writer().width_of_current_line  # the letters of tests
                terminal.write("\n" * bool(begun) + line + "\n", flush=True)

    return partial(conform, tell=tell)
