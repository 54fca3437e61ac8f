"""The kit as a pytest plugin: fixtures, gating by capabilities, known failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Hashable
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from attrs import define, field

from accel_core import CAPABILITIES, Record
from accel_testing.kit import checks
from accel_testing.kit.arguments import Arguments, next_command, scenario
from accel_testing.kit.checks import is_check, name_of
from accel_testing.kit.deadline import DEADLINE, idle_seconds
from accel_testing.kit.report import LEVELS, Check, Report
from accel_testing.kit.stack import OUTSIDE_OF_RUNS, TestedStack, variables
from accel_testing.kit.tasks import Scenario
from accel_testing.processes import PRELOAD_VARIABLE, ProcessError, forking, run_processes
from accel_testing.simulated import CARD, declare

__all__ = ["Kit"]

R = TypeVar("R")


@define(eq=False)
class Kit:
    """A pytest plugin for one stack; registered when --accel-stack is given."""

    asked: Arguments
    report: Report
    _temporary: TemporaryDirectory[str]
    _environment: pytest.MonkeyPatch
    _done: dict[Hashable, Any] = field(factory=dict)

    @classmethod
    def from_config(cls, config: pytest.Config) -> Kit:
        """Make the kit that the command line asks for.

        Raises:
            pytest.UsageError: there is no such stack, or an option is wrong.
        """
        temporary, environment = TemporaryDirectory(prefix="accel-kit-"), pytest.MonkeyPatch()
        if CARD.name in config.getoption("accel_stack").split("+"):
            declare(Path(temporary.name))
        if config.getoption("accel_simulate") is not None:
            # A library that looks for devices would make the simulated one where workers are forked.
            environment.delenv(PRELOAD_VARIABLE, raising=False)
        if deadline := config.getoption("accel_deadline"):
            environment.setenv(DEADLINE, str(deadline))
        asked = Arguments.of(config, Path(temporary.name, "project"))
        if not (config.getoption("collectonly") or asked.stack.plugins.keys() <= OUTSIDE_OF_RUNS):
            forking()  # its server imports torch while pytest collects, and while level 0 runs
        report = Report(stack=asked.stack, worlds=asked.worlds, complete=asked.complete)
        return cls(asked=asked, report=report, temporary=temporary, environment=environment)

    @property
    def tested(self) -> TestedStack:
        """The stack under test."""
        return self.asked.stack

    @property
    def worlds(self) -> list[int]:
        """Numbers of processes for levels 3 and 4."""
        return [*self.asked.worlds]

    # -- what checks share -----------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """A place for files; removed at the end."""
        return Path(self._temporary.name)

    @cached_property
    def scenarios(self) -> list[Scenario]:
        """The scenarios of level 4: the stack, its partners, one native process.

        In this order: torch counts the devices of a process at its first backward. A quick run has the stack
        alone.
        """
        own = [Scenario(self.tested.name, {}, world) for world in self.worlds]
        shared = self.tested.settings_without("strategy", "extension")
        others = [scenario(each, max(self.worlds), shared) for each in self.asked.exchange_with]
        bare = variables(self.tested.settings_without("device", "strategy", "extension"))
        native = Scenario("native", {"device": "cpu", "strategy": None, "plugins": None}, 1, bare)
        scenarios: dict[str, Scenario] = {}
        for each in own if self.asked.quick else (*own, *others, native):
            scenarios.setdefault(str(each), each)
        return list(scenarios.values())

    def once(self, key: Hashable, task: Callable[[], R]) -> R:
        """Call `task` the first time; repeat its result, or its exception, later."""
        if key not in self._done:
            try:
                self._done[key] = task()
            except Exception as error:  # raised again to every check that needs it, without the wait
                self._done[key] = error
        if isinstance(self._done[key], Exception):
            raise self._done[key]
        found: R = self._done[key]
        return found

    def count_readers(self, run: Callable[..., list[Any]], world: int) -> int:
        """Count the readers in a world of this size."""
        return self._sharing(run, world)[0]

    def require_own_network(self) -> None:
        """Skip a check that knows the kit's own network from inside."""
        if self.tested.network is not None:
            pytest.skip(f"the network is that of {self.tested.network}, and the check is of the kit's own")

    def require_loops(self, run: Callable[..., list[Any]], world: int) -> None:
        """Skip a check that needs a loop of the kit's own network."""
        self.require_own_schedule(run, world)
        self.require_own_network()

    def require_own_schedule(self, run: Callable[..., list[Any]], world: int) -> None:
        """Skip a check that needs a loop with its own forward and backward."""
        if self._sharing(run, world)[1]:
            pytest.skip("the strategy owns the schedule: forward and backward are forward_backward's")

    def _sharing(self, run: Callable[..., list[Any]], world: int) -> tuple[int, bool]:
        from accel_testing.kit.tasks import sharing

        found: tuple[int, bool] = self.once(("sharing", world), lambda: run(sharing, world=world)[0])
        return found

    # -- collection ------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        """Print the stack above the results."""
        return self.report.title

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a check per world size, per plugin, or per pair of scenarios."""
        if not is_check(metafunc.definition):
            return
        if "world" in metafunc.fixturenames:
            metafunc.parametrize("world", self.worlds, ids=lambda world: f"world{world}")
        if "plugin" in metafunc.fixturenames:
            metafunc.parametrize("plugin", self.tested.described, ids=lambda record: record.name)
        if "saver" in metafunc.fixturenames:
            pairs = [pair for pair in product(self.scenarios, repeat=2) if pair[0].own or pair[1].own]
            ids = [f"{saver}->{loader}" for saver, loader in pairs]
            metafunc.parametrize(("saver", "loader"), pairs, ids=ids)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Select checks, make the stack's warnings errors, mark known failures."""
        found = [item for item in items if is_check(item)]
        self._refuse_unknown({name_of(item) for item in found})
        dropped = [item for item in found if not self._selects(item)]
        if dropped:
            items[:] = [item for item in items if item not in dropped]
            config.hook.pytest_deselected(items=dropped)
        for item in found:
            item.add_marker(pytest.mark.kit)  # it starts processes, as tests by the fixture `conform` do
            for package in ("accel_core", *self.tested.packages):
                # Only their own: vendors' libraries warn when they are imported.
                item.add_marker(pytest.mark.filterwarnings(rf"error:::{package}(\.|$)"))
            if name_of(item) in self.asked.xfails:
                reason = self.asked.xfails[name_of(item)]
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def _selects(self, item: pytest.Item) -> bool:
        """Tell if a check runs: the one place that decides."""
        asked = self.asked
        return (
            checks.level_of(item) in asked.levels
            and not checks.slots_of(item).isdisjoint(self.tested.plugins)
            and (not asked.quick or checks.is_quick(item))
            and (not asked.only or name_of(item) in asked.only)
        )

    def _refuse_unknown(self, known: set[str]) -> None:
        named: dict[str, Collection[str]] = {"only": self.asked.only}
        if self.asked.complete and self.asked.levels == LEVELS.keys():
            named["xfails"] = self.asked.xfails
        for option, names in named.items():
            if wrong := sorted({*names} - known):
                raise pytest.UsageError(f"--accel-{option} names what is not a check: {', '.join(wrong)}")

    # -- running ---------------------------------------------------------------------------------

    @pytest.fixture
    def stack(self) -> TestedStack:
        """Return the stack under test."""
        return self.tested

    @pytest.fixture
    def tracker(self) -> Record:
        """Return the stack's tracker; without one, checks that take it are left out."""
        return self.tested.plugins["tracker"]

    @pytest.fixture
    def launcher(self) -> Record:
        """Return the launcher of the stack. Stacks without one leave out its checks."""
        return self.tested.plugins["launcher"]

    @pytest.fixture
    def store(self) -> Record:
        """Return the store of the stack, likewise."""
        return self.tested.plugins["store"]

    @pytest.fixture
    def command(self) -> Record:
        """Return the command of the stack, likewise."""
        return self.tested.plugins["command"]

    @pytest.fixture
    def readers(self, run: Callable[..., list[Any]], world: int) -> int:
        """Count the readers in a world of this size."""
        return self.count_readers(run, world)

    @pytest.fixture
    def kit(self) -> Kit:
        """Return the kit itself, for what checks share."""
        return self

    @pytest.fixture
    def run(self) -> Callable[..., list[Any]]:
        """`run(function, *args, world=1)` in new processes, and the stack's arguments."""
        device = self.tested.plugins.get("device")
        simulate = None
        if self.tested.simulate is not None and device is not None:
            simulate = (device.name, self.tested.simulate, self.asked.stand_in)

        def call(function: Callable[..., Any], *args: Any, world: int = 1) -> list[Any]:
            from accel_testing.kit.tasks import OFFERS, enter

            given = (*args, self.tested.arguments)
            changes = {**_bare(), **self.tested.environment, OFFERS: " ".join(self.tested.offers)}
            task = enter, simulate, function, given
            return run_processes(*task, world=world, environment=changes, timeout=idle_seconds())

        return call

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record a check. Skip one of a capability that no card offers, or that is newer than the card."""
        report = yield
        if is_check(item):
            check = self._judged(item, report, call)
            if check is not None:
                self.report.checks.append(check)
            if check is not None and check.outcome in ("skipped", "new") and report.outcome != "skipped":
                report.outcome, report.longrepr = "skipped", (str(item.path), 0, check.reason)
        return report

    def _judged(
        self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]
    ) -> Check | None:
        """Return the outcome of a check; None for a part of it that may pass without a word."""
        if report.when != "call" and report.outcome == "passed":
            return None
        outcome, reason, lacks = str(report.outcome), "", []
        if hasattr(report, "wasxfail"):
            outcome, reason = "xfailed", report.wasxfail
        elif outcome == "skipped":
            reason = str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        else:
            reason, lacks = _failure(call), sorted(checks.words_of(item) - self.tested.offers)
            version = checks.version_of(item)
            if lacks and report.when == "call":
                (self.report.held if outcome == "passed" else self.report.broke).update(lacks)
                reason = f"not declared by the stack: {', '.join(lacks)} ({CAPABILITIES[lacks[0]]})"
                outcome = "skipped"
            elif checks.is_newer(version, self._version(item)):
                ends = f"would fail: {reason}" if outcome == "failed" else "would pass"
                outcome, reason = "new", f"new since {version}: {ends}"
        return Check(checks.level_of(item), name_of(item), outcome, reason, report.duration, lacks)

    def _version(self, item: pytest.Item) -> str:
        """Return the version of the contract for which all were written that a check is of."""
        plugin = getattr(item, "callspec", None) and item.callspec.params.get("plugin")  # type: ignore[attr-defined]
        return self.tested.api_version([plugin.slot] if plugin else checks.slots_of(item))

    # -- afterwards ------------------------------------------------------------------------------

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Print what was not checked, the result in one line, and what to run next."""
        if failed := self.report.of("failed"):
            self.report.next = next_command(config, failed)
        terminalreporter.section("accel-core conformance")
        for line in self.report.summary():
            terminalreporter.write_line(line)
        if self.asked.report_file:
            Path(self.asked.report_file).write_text(self.report.render(self.asked.report_file))

    def pytest_unconfigure(self) -> None:
        """Remove the simulated device's declaration, and give variables back."""
        self._environment.undo()
        self._temporary.cleanup()


def _failure(call: pytest.CallInfo[None]) -> str:
    """Name the exception of a failed check, or that of its process, in one line."""
    if call.excinfo is None:
        return ""
    error = call.excinfo.value
    if isinstance(error, ProcessError):
        *_, last = error.text.strip().splitlines() or [""]
        return f"{error.kind}: {last}"
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _bare() -> dict[str, str | None]:
    """Unset the caller's settings, which would contradict those of a check."""
    return {name: None for name in os.environ if name.startswith(("ACCEL__", "ACCEL_CONFIG", "ACCEL_LAUNCH"))}
