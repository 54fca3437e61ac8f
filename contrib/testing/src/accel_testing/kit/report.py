"""The results of a run of the kit: a summary, and a file to publish."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from attrs import asdict, define, field, frozen

from accel_core import API_VERSION, __version__
from accel_testing.kit.stack import TestedStack

__all__ = ["LEVELS", "Check", "Report"]

LEVELS = {0: "packaging", 1: "device", 2: "training", 3: "processes", 4: "checkpoints"}


@frozen
class Check:
    """One check's outcome: passed, failed, xfailed, skipped, or new."""

    level: int
    name: str
    outcome: str
    reason: str
    seconds: float
    lacks: Sequence[str] = ()
    """Capability words that no card of the stack offers."""


@define
class Report:
    """Everything about one run of the kit."""

    stack: TestedStack
    worlds: Sequence[int]
    complete: bool = True
    """False if only some checks of the levels were to run."""
    checks: list[Check] = field(factory=list)
    next: str = ""
    """The command that runs what failed again."""
    held: set[str] = field(factory=set)
    """Capability words that no card claims, of checks that passed."""
    broke: set[str] = field(factory=set)
    """The same, of checks that did not."""

    @property
    def title(self) -> str:
        """Kit, stack and worlds, in a line."""
        worlds = ", ".join(map(str, self.worlds))
        return f"accel-core conformance kit {__version__} (API {API_VERSION}): {self.stack}, worlds {worlds}"

    @property
    def observed(self) -> list[str]:
        """Capability words that the cards could claim: all their checks passed."""
        return sorted(self.held - self.broke)

    @property
    def last_outcome(self) -> str:
        """The outcome of the check that ended last."""
        return self.checks[-1].outcome if self.checks else ""

    def of(self, outcome: str) -> list[Check]:
        """Return the checks with that outcome."""
        return [check for check in self.checks if check.outcome == outcome]

    @property
    def resumes(self) -> dict[str, dict[str, str]]:
        """Map the saver to the loader to the outcome, for the pairs that ran."""
        found: dict[str, dict[str, str]] = {}
        for check in self.checks:
            if pair := re.search(r"test_cross_resume\[(.+)->(.+)\]", check.name):
                found.setdefault(pair[1], {})[pair[2]] = check.outcome
        return found

    def _table(self) -> Iterator[str]:
        scenarios = self.resumes
        if scenarios:
            yield f"| saved by, resumed by: | {' | '.join(scenarios)} |"
            yield f"|---|{'---|' * len(scenarios)}"
        for saver, row in scenarios.items():
            yield f"| {saver} | {' | '.join(row.get(loader, '') for loader in scenarios)} |"

    def summary(self) -> Iterator[str]:
        """Yield the terminal's lines: skipped checks, unclaimed capabilities, counts."""
        yield from self._table()
        for outcome in ("skipped", "xfailed"):
            for check in self.of(outcome):
                yield f"{outcome}: {check.name}: {check.reason}"
        for check in self.of("new"):
            yield f"{check.name}: {check.reason}"
        if self.observed:
            yield f"observed but not declared: {', '.join(self.observed)}"
        counts = Counter(check.outcome for check in self.checks)
        yield f"{self.stack}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in self._outcomes)}"
        if self.next:
            yield f"next: {self.next}"

    @property
    def _outcomes(self) -> list[str]:
        return ["passed", "failed", "xfailed", "skipped", *(["new"] if self.of("new") else [])]

    def render(self, file: str) -> str:
        """Return the text of a report file: JSON for *.json, else Markdown."""
        return json.dumps(self._facts(), indent=2) + "\n" if file.endswith(".json") else self._markdown()

    def _facts(self) -> dict[str, Any]:
        return {
            "kit": __version__,
            "api_version": API_VERSION,
            "stack": [
                {"slot": r.slot, "plugin": r.name, "distribution": r.distribution, "version": r.version}
                for r in self.stack.records
            ],
            "settings": dict(self.stack.settings),
            "network": self.stack.network,
            "simulated": self.stack.simulated,
            "worlds": list(self.worlds),
            "complete": self.complete,
            "next": self.next,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "counts": dict(Counter(check.outcome for check in self.checks)),
            "observed_but_not_declared": self.observed,
            "resumes": self.resumes,
            "checks": [asdict(check) for check in self.checks],
        }

    def _markdown(self) -> str:
        facts = self._facts()
        lines = [f"# {self.title}", ""]
        if self.stack.simulated:
            lines += ["**Simulated**: obtained without the hardware, on accel-core's simulated device.", ""]
        lines += [
            f"* {p['slot']}: {p['plugin']} ({p['distribution']} {p['version']})" for p in facts["stack"]
        ]
        lines += [f"* torch {facts['torch']}, Python {facts['python']}, {facts['platform']}", ""]
        outcomes = self._outcomes
        lines += [f"| level | {' | '.join(outcomes)} |", "|---|" + "---|" * len(outcomes)]
        for level, name in LEVELS.items():
            counts = Counter(check.outcome for check in self.checks if check.level == level)
            lines.append(f"| {level} {name} | {' | '.join(str(counts[outcome]) for outcome in outcomes)} |")
        lines += ["", *self._table()]
        for outcome in ("failed", "xfailed", "skipped", "new"):
            found = self.of(outcome)
            if found:
                lines += ["", f"## {outcome}", ""]
                lines += [f"* `{check.name}` {check.reason}".rstrip() for check in found]
        if self.observed:
            lines += ["", f"Observed but not declared: {', '.join(self.observed)}."]
        return "\n".join(lines) + "\n"
