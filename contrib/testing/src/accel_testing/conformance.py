"""Run the conformance kit from a test, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from attrs import field, frozen

__all__ = ["Conformance", "conform"]

KIT: Final = (
    *("--pyargs", "accel_testing", "-p", "no:cacheprovider"),
    *("-o", "console_output_style=classic"),  # the kit itself tells how much is left
)
TOLD_EVERY: Final = 10.0
"""Seconds between two lines that tell how far the kit is."""
REPORTS: Final = "ACCEL_KIT_REPORTS"
"""Variable that names a folder for reports of all runs."""


@frozen
class Conformance:
    """Outcomes of the checks of a stack.

    Checks have the names that files of known failures have: `test_1_device.py::test_services_answer`.
    """

    stack: str
    passed: frozenset[str] = field(repr=False)
    failed: frozenset[str]
    xfailed: frozenset[str]
    skipped: frozenset[str]
    """Capability words that checks need and no card offers; of checks skipped otherwise, functions' names."""
    new: frozenset[str]
    """Checks of promises that are newer than the card; none of them fails."""
    levels: frozenset[int]
    """Levels of which a check ran."""
    observed: frozenset[str]
    """Capability words that the cards could offer, and do not."""
    reasons: Mapping[str, str] = field(repr=False)
    """Check -> why it did not simply pass."""
    output: str = field(repr=False)
    """The text that the kit printed."""
    report: Mapping[str, Any] = field(repr=False)
    """The content of the report as JSON, which `--accel-report` writes."""

    @classmethod
    def of(cls, report: Mapping[str, Any], output: str = "") -> Conformance:
        """Read a report."""
        checks = report["checks"]

        def named(outcome: str) -> frozenset[str]:
            return frozenset(check["name"] for check in checks if check["outcome"] == outcome)

        left_out = [check for check in checks if check["outcome"] == "skipped"]
        return cls(
            stack="+".join(plugin["plugin"] for plugin in report["stack"]),
            passed=named("passed"),
            failed=named("failed"),
            xfailed=named("xfailed"),
            skipped=frozenset(word for check in left_out for word in check["lacks"] or [_function(check)]),
            new=named("new"),
            levels=frozenset(check["level"] for check in checks),
            observed=frozenset(report["observed_but_not_declared"]),
            reasons={check["name"]: check["reason"] for check in checks if check["reason"]},
            output=output,
            report=report,
        )

    @property
    def counts(self) -> Counter[str]:
        """Outcome -> number of checks."""
        return Counter(check["outcome"] for check in self.report["checks"])


def _function(check: Mapping[str, Any]) -> str:
    name: str = check["name"]
    return name.partition("::")[2].partition("[")[0]


def conform(
    folder: Path,
    stack: str,
    *options: str,
    path: Sequence[Path] = (),
    check: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Conformance:
    """Run the kit on `stack` in `folder`, and return what it found.

    Leaves the report in the folder that ACCEL_KIT_REPORTS names, if it is set.

    `options` are those of the kit, such as `--accel-level` and `0,1`. `folder` and `path` come first on the
    import path. Without `check` a check that failed is returned among the others. `tell` gets a line every
    ten seconds, which says how far the kit is.

    Raises:
        AssertionError: a check failed, or no check ran; the message ends with what the kit printed.
    """
    inherited = os.environ.get("PYTHONPATH")
    places = [str(folder), *map(str, path), *([inherited] if inherited else [])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    with TemporaryDirectory(prefix="accel-conform-") as beside:
        file = Path(beside, "report.json")
        words = [*KIT, "--accel-stack", stack, *options, "--accel-report", str(file)]
        streams = [Path(beside, name) for name in ("stdout", "stderr")]
        for stream in streams:
            stream.touch()
        _run(words, variables, folder, streams, lambda: _tell(tell, stack, streams[0]))
        printed, errors = (stream.read_text(errors="replace") for stream in streams)
        if not file.exists():
            raise AssertionError(f"{stack}: the kit has not run\n{printed[-6000:]}{errors[-2000:]}")
        text = file.read_text(encoding="utf-8")
    found = Conformance.of(json.loads(text), printed)
    _keep(stack, text)
    if not found.levels or (check and found.failed):
        raise AssertionError(_failure(found, places, printed[-6000:] + errors[-2000:]))
    return found


def _failure(found: Conformance, places: Sequence[str], printed: str) -> str:
    if not found.levels:
        return f"{found.stack}: no check was selected\n{printed}"
    lines = [f"{found.stack}: {name}: {found.reasons.get(name, '')}" for name in sorted(found.failed)]
    again = f"PYTHONPATH={os.pathsep.join(places)} {found.report['next']}"
    return "\n".join([printed, *lines, f"next: {again}"])


def _keep(stack: str, text: str) -> None:
    if reports := os.environ.get(REPORTS):
        Path(reports).mkdir(parents=True, exist_ok=True)
        Path(reports, f"{stack}-{uuid.uuid4().hex}.json").write_text(text, encoding="utf-8")


def _tell(tell: Callable[[str], None] | None, stack: str, output: Path) -> None:
    """Pass on the check that runs, and how much is left by the line before."""
    if tell is None:
        return
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.startswith("[")]
    check = re.match(r"\[.*?\] \S+", lines[-1]) if lines else None
    left = re.findall(r", about \S+ left", "".join(lines[-2:]))
    tell(f"{stack}: {check[0] if check else 'the conformance kit begins'}{left[-1] if left else ''}")


# -- the process of the kit ------------------------------------------------------------------------


def _run(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    streams: Sequence[Path],
    tell: Callable[[], None],
) -> None:
    """Run pytest, forked where torch is loaded if that can do no harm, and wait for its end."""
    from accel_testing.commands import fork_command
    from accel_testing.processes import PRELOAD_VARIABLE, forking

    simulated = "--accel-simulate" in words  # the kit then has no such modules
    preload = "" if simulated else variables.get(PRELOAD_VARIABLE, "")
    if sys.version_info < (3, 14) and forking(preload):
        # Of accel_testing, which is loaded already, pytest would say that it cannot rewrite its asserts.
        words = ["pytest", "-W", "ignore::pytest.PytestAssertRewriteWarning", *words]
        given = words, variables, str(folder), [str(stream) for stream in streams]
        _wait(_Forked(fork_command("accel_testing.conformance:_work", *given, path=_fresh_path())), tell)
        return
    with streams[0].open("w") as output, streams[1].open("w") as errors:
        command = [sys.executable, "-m", "pytest", *words]
        _wait(subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=errors), tell)


@frozen
class _Forked:
    """A process of multiprocessing with the methods of one of `subprocess`."""

    _process: Any

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.is_alive():
            raise subprocess.TimeoutExpired(["pytest"], timeout or 0)

    def kill(self) -> None:
        self._process.kill()


def _wait(process: Any, tell: Callable[[], None]) -> None:
    told = time.monotonic()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
                return
            if time.monotonic() - told >= TOLD_EVERY:
                told = time.monotonic()
                tell()
    except BaseException:  # a timeout of the test, or Ctrl-C
        process.kill()
        process.wait()
        raise


@cache
def _fresh_path() -> list[str]:
    """Return the import path of a new interpreter: tests have put folders into this one's."""
    given = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    text = subprocess.run([sys.executable, "-c", code], env=given, check=True, capture_output=True).stdout
    found: list[str] = json.loads(text)
    return found


def _work() -> None:
    """Be pytest, in a forked process, whose own processes come from the same server."""
    import pytest

    from accel_testing.processes import share_server

    share_server()
    pytest.console_main()
