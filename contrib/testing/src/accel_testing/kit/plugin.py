"""The kit as a pytest plugin: fixtures, gating by capabilities, known failures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from attrs import define, field

from accel_core import CAPABILITIES, PluginError, Record, discover
from accel_testing.kit.report import LEVELS, Check, Report
from accel_testing.kit.stack import OUTSIDE_OF_RUNS, TestedStack, variables
from accel_testing.kit.tasks import Scenario
from accel_testing.processes import PRELOAD_VARIABLE, ProcessError, run_processes
from accel_testing.simulated import CARD, declare

__all__ = ["Kit"]

R = TypeVar("R")

_FOLDER = Path(__file__).parent
_SECONDS = 60


@define(eq=False)
class Kit:
    """A pytest plugin for one stack; registered when --accel-stack is given."""

    tested: TestedStack
    worlds: Sequence[int]
    levels: frozenset[int]
    xfails: Mapping[str, str]
    report_file: str | None
    report: Report
    _temporary: TemporaryDirectory[str]
    _environment: pytest.MonkeyPatch
    stand_in: str | None = None
    """A module that stands for the vendor's library in each process."""
    exchange_with: Sequence[str] = ()
    """Strategies whose checkpoints are exchanged with the stack's."""
    _done: dict[Hashable, Any] = field(factory=dict)

    @classmethod
    def from_config(cls, config: pytest.Config) -> Kit:
        """Make the kit that the command line asks for.

        Raises:
            pytest.UsageError: there is no such stack, or an option is wrong.
        """
        text: str = config.getoption("accel_stack")
        temporary, environment = TemporaryDirectory(prefix="accel-kit-"), pytest.MonkeyPatch()
        if CARD.name in text.split("+"):
            declare(Path(temporary.name))
        try:
            simulate = config.getoption("accel_simulate")
            if simulate is not None:
                # A library that looks for devices would make the simulated one where workers are forked.
                environment.delenv(PRELOAD_VARIABLE, raising=False)
            settings = dict(_setting(each) for each in config.getoption("accel_set"))
            project = str(Path(temporary.name, "project"))
            network = config.getoption("accel_network")
            reference = config.getoption("accel_reference")
            stack = TestedStack.parse(text, discover(), simulate, project, settings, network, reference)
        except PluginError as error:
            raise pytest.UsageError(str(error)) from None
        worlds = _numbers(config.getoption("accel_world") or ("1,2" if "strategy" in stack.plugins else "1"))
        return cls(
            tested=stack,
            worlds=worlds,
            levels=frozenset(_numbers(config.getoption("accel_level") or ",".join(map(str, LEVELS)))),
            xfails=_read_xfails(config.getoption("accel_xfails")),
            report_file=config.getoption("accel_report"),
            report=Report(stack=stack, worlds=worlds),
            temporary=temporary,
            environment=environment,
            stand_in=config.getoption("accel_stand_in"),
            exchange_with=_exchange_partners(config.getoption("accel_exchange_with"), stack),
        )

    # -- what checks share -----------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """A place for files; removed at the end."""
        return Path(self._temporary.name)

    @cached_property
    def scenarios(self) -> list[Scenario]:
        """The scenarios of level 4: the stack, its partners, one native process.

        In this order: torch counts the devices of a process at its first backward.
        """
        own = [Scenario(self.tested.name, {}, world) for world in self.worlds]
        shared = self.tested.settings_without("strategy", "extension")
        others = [_scenario(each, max(self.worlds), shared) for each in self.exchange_with]
        bare = variables(self.tested.settings_without("device", "strategy", "extension"))
        native = Scenario("native", {"device": "cpu", "strategy": None, "plugins": None}, 1, bare)
        scenarios: dict[str, Scenario] = {}
        for scenario in (*own, *others, native):
            scenarios.setdefault(str(scenario), scenario)
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

    def readers(self, run: Callable[..., list[Any]], world: int) -> int:
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
        if _is_check(metafunc.definition) and "world" in metafunc.fixturenames:
            metafunc.parametrize("world", self.worlds, ids=lambda world: f"world{world}")
        if _is_check(metafunc.definition) and "plugin" in metafunc.fixturenames:
            metafunc.parametrize("plugin", list(self.tested.plugins.values()), ids=lambda record: record.name)
        if _is_check(metafunc.definition) and "saver" in metafunc.fixturenames:
            pairs = [pair for pair in product(self.scenarios, repeat=2) if pair[0].own or pair[1].own]
            ids = [f"{saver}->{loader}" for saver, loader in pairs]
            metafunc.parametrize(("saver", "loader"), pairs, ids=ids)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Select levels, make the stack's warnings errors, mark known failures."""
        checks = [item for item in items if _is_check(item)]
        unknown = self.xfails.keys() - {_name(item) for item in checks}
        if unknown and self.levels == LEVELS.keys():
            raise pytest.UsageError(f"--accel-xfails names what is not a check: {', '.join(sorted(unknown))}")
        dropped = [item for item in checks if _level(item) not in self.levels or not self._concerns(item)]
        if dropped:
            items[:] = [item for item in items if item not in dropped]
            config.hook.pytest_deselected(items=dropped)
        for item in checks:
            for package in ("accel_core", *self.tested.packages):
                # Only their own: vendors' libraries warn when they are imported.
                item.add_marker(pytest.mark.filterwarnings(rf"error:::{package}(\.|$)"))
            if _name(item) in self.xfails:
                item.add_marker(pytest.mark.xfail(reason=self.xfails[_name(item)], strict=True))

    def _concerns(self, item: Any) -> bool:
        """Tell if the stack has the tracker, launcher, store or command of the check.

        Without a plugin that takes part in runs, checks of runs would only check core.
        """
        asked = {*OUTSIDE_OF_RUNS, "tracker"} & set(item.fixturenames)
        if self.tested.plugins.keys() <= OUTSIDE_OF_RUNS and not asked and "plugin" not in item.fixturenames:
            return False
        return asked <= self.tested.plugins.keys()

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
    def kit(self) -> Kit:
        """Return the kit itself, for what checks share."""
        return self

    @pytest.fixture
    def run(self) -> Callable[..., list[Any]]:
        """`run(function, *args, world=1)` in new processes, and the stack's arguments."""
        device = self.tested.plugins.get("device")
        simulate = None
        if self.tested.simulate is not None and device is not None:
            simulate = (device.name, self.tested.simulate, self.stand_in)

        def call(function: Callable[..., Any], *args: Any, world: int = 1) -> list[Any]:
            from accel_testing.kit.tasks import OFFERS, enter

            given = (*args, self.tested.arguments)
            variables = {**_bare(), **self.tested.environment, OFFERS: " ".join(self.tested.offers)}
            return run_processes(
                enter, simulate, function, given, world=world, environment=variables, timeout=_SECONDS
            )

        return call

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Skip a check of a capability that no card of the stack offers."""
        report = yield
        if not _is_check(item):
            return report
        undeclared = sorted(_required(item) - self.tested.offers)
        if undeclared and call.when == "call" and report.outcome != "skipped":
            (self.report.held if report.outcome == "passed" else self.report.broke).update(undeclared)
            words = ", ".join(undeclared)
            report.outcome = "skipped"
            report.longrepr = (
                str(item.path),
                0,
                f"not declared by the stack: {words} ({CAPABILITIES[undeclared[0]]})",
            )
        self._record(item, report, call)
        return report

    def _record(self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        reason = ""
        if hasattr(report, "wasxfail"):
            outcome, reason = "xfailed", report.wasxfail
        elif report.outcome == "skipped":
            outcome, reason = "skipped", str(report.longrepr[2]).removeprefix("Skipped: ")  # type: ignore[index]
        else:
            outcome, reason = report.outcome, _failure(call)
        self.report.checks.append(Check(_level(item), _name(item), outcome, reason, report.duration))

    # -- afterwards ------------------------------------------------------------------------------

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print what was not checked, and the result in one line."""
        terminalreporter.section("accel-core conformance")
        for line in self.report.summary():
            terminalreporter.write_line(line)
        if self.report_file:
            Path(self.report_file).write_text(self.report.render(self.report_file))

    def pytest_unconfigure(self) -> None:
        """Remove the simulated device's declaration, and give variables back."""
        self._environment.undo()
        self._temporary.cleanup()


def requires(*words: str) -> pytest.MarkDecorator:
    """Mark a check that only a stack offering these capability words has to pass."""
    unknown = set(words) - CAPABILITIES.keys()
    assert not unknown, unknown
    return pytest.mark.accel_requires(frozenset(words))


def _required(item: pytest.Item) -> frozenset[str]:
    return frozenset().union(*(mark.args[0] for mark in item.iter_markers("accel_requires")))


def _is_check(item: Any) -> bool:
    return _FOLDER in item.path.parents


def _name(item: pytest.Item) -> str:
    return item.nodeid.rpartition("/")[2]


def _level(item: pytest.Item) -> int:
    found = re.match(r"test_(\d)_", item.path.name)
    assert found is not None, item.path
    return int(found[1])


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


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise pytest.UsageError(f"expected numbers joined by commas, such as 1,2; got {text!r}")
    return [int(number) for number in text.split(",")]


def _setting(text: str) -> tuple[str, str]:
    path, equals, value = text.partition("=")
    if not equals:
        raise pytest.UsageError(
            f"--accel-set expects OPTION=VALUE, such as data.even_batches=false; got {text!r}"
        )
    return path, value


def _exchange_partners(named: str | None, stack: TestedStack) -> list[str]:
    """List the named strategies, else those that core may choose by itself."""
    if named is not None:
        return [name for name in named.split(",") if name]
    usable = [
        record.card
        for record in discover().records
        if record.slot == "strategy" and record.status == "available" and record.card is not None
    ]
    return [
        card.name
        for card in usable
        if card.priority and card.needs <= stack.offers and card.name not in stack.arguments.values()
    ]


def _scenario(text: str, world: int, shared: Mapping[str, str]) -> Scenario:
    """Read a partner: NAME or NAME@WORLD, and after a colon options of its own."""
    name, colon, options = text.partition(":")
    name, _, size = name.partition("@")
    settings = dict(_setting(each) for each in options.split("+") if each)
    changes = {"strategy": name, "plugins": None}
    given = variables({**shared, **settings})
    return Scenario(name + colon + options, changes, _numbers(size)[0] if size else world, given)


def _read_xfails(file: str | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(Path(file).read_text().splitlines() if file else (), 1):
        check, _, reason = line.partition("#")
        if check.strip() and not reason.strip():
            raise pytest.UsageError(
                f"{file}:{number}: no reason; write CHECK  # why it fails, and where that is tracked"
            )
        if check.strip():
            found[check.strip()] = reason.strip()
    return found


def _bare() -> dict[str, str | None]:
    """Unset the caller's settings, which would contradict those of a check."""
    return {name: None for name in os.environ if name.startswith(("ACCEL__", "ACCEL_CONFIG", "ACCEL_LAUNCH"))}
