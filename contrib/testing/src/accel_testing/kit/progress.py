"""A line per check while the kit runs: its number, name, outcome, and about how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import pytest
from attrs import define, field

from accel_testing.kit.checks import is_check, level_of

if TYPE_CHECKING:
    from accel_testing.kit.report import Report

__all__ = ["Progress"]

WEIGHTS: Final = {0: 0.5, 1: 0.5, 2: 1.0, 3: 1.0, 4: 1.5}
"""Level -> the time of a check, roughly and in relation to the others."""
LEAST_ENDED: Final = 3
"""Checks after which the rest is estimated."""


@define(eq=False)
class Progress:
    """A pytest plugin, which writes where pytest writes a letter per test."""

    _report: Report
    _terminal: Any = None
    """Pytest's terminal; None with -q and -v, which have lines of their own."""
    _ahead: dict[str, float] = field(factory=dict)
    """Node id -> weight of each check that has not ended."""
    _ended: list[tuple[float, float]] = field(factory=list)
    """Seconds and weight of each check that has ended."""
    _total: int = 0
    _began: float = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the checks that will run."""
        self._ahead = {item.nodeid: WEIGHTS[level_of(item)] for item in session.items if is_check(item)}
        self._total = len(self._ahead)
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None and terminal.verbosity == 0:
            self._terminal, terminal.showfspath = terminal, False

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> Generator[None, Any, Any]:
        """Leave out the letter of a check."""
        status = yield
        return (status[0], "", "") if self._terminal and report.nodeid in self._ahead else status

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Begin the line of a check."""
        if self._terminal and nodeid in self._ahead:
            self._began = time.monotonic()
            number = f"{len(self._ended) + 1:>{len(str(self._total))}}"
            self._terminal.write(f"[{number}/{self._total}] {nodeid.rpartition('/')[2]} ", flush=True)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """End the line of a check."""
        if self._terminal and nodeid in self._ahead:
            seconds = time.monotonic() - self._began
            self._ended.append((seconds, self._ahead.pop(nodeid)))
            told = f"{self._report.last_outcome} ({seconds:.1f} s{self._rest()})"
            self._terminal.write(f"{told}\n", flush=True)

    def _rest(self) -> str:
        """Estimate the time of the rest."""
        if len(self._ended) < LEAST_ENDED or not self._ahead:
            return ""
        # The longest check waited for what the others found ready.
        seconds, weights = map(sum, zip(*sorted(self._ended)[:-1], strict=True))
        minutes, rest = divmod(round(seconds * sum(self._ahead.values()) / weights), 60)
        return f", about {minutes}:{rest:02} left"
