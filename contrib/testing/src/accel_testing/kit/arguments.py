"""The kit's options, read and checked, and the command that runs some of its checks again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import frozen

from accel_core import PluginError, discover
from accel_testing.kit.report import LEVELS, Check
from accel_testing.kit.stack import TestedStack, variables
from accel_testing.kit.tasks import Scenario

__all__ = ["Arguments", "next_command", "scenario"]

NAMED_ONE_BY_ONE: Final = 6
"""Failed checks that `next:` names; for more of them it names their level."""
REPEATED: Final = (
    *("world", "set", "network", "reference", "store", "simulate", "stand-in"),
    *("exchange-with", "xfails", "deadline"),
)
"""Options of a run that the next one needs, too."""


@frozen(kw_only=True)
class Arguments:
    """A run of the kit as the command line asks for it."""

    stack: TestedStack
    worlds: Sequence[int]
    levels: frozenset[int]
    quick: bool
    only: frozenset[str]
    """Names of checks; empty for all."""
    xfails: Mapping[str, str]
    report_file: str | None
    stand_in: str | None
    """A module that stands for the vendor's library in each process."""
    exchange_with: Sequence[str]
    """Strategies whose checkpoints are exchanged with the stack's."""
    complete: bool
    """True if all checks of the levels run."""

    @classmethod
    def of(cls, config: pytest.Config, project: Path) -> Arguments:
        """Read the options; `project` is the folder of a tracker.

        Raises:
            pytest.UsageError: there is no such stack, or an option is wrong.
        """
        options = _Options(config)
        try:
            stack = _stack(options, project)
        except PluginError as error:
            raise pytest.UsageError(str(error)) from None
        quick, only = bool(options["quick"]), frozenset(options["only"])
        several = "strategy" in stack.plugins
        usual = ("2" if quick else "1,2") if several else "1"
        filtered = config.getoption("keyword", "") or config.getoption("markexpr", "")
        return cls(
            stack=stack,
            worlds=_numbers(options["world"] or usual),
            levels=frozenset(_numbers(options["level"] or ",".join(map(str, LEVELS)))),
            quick=quick,
            only=only,
            xfails=_read_xfails(options["xfails"]),
            report_file=options["report"],
            stand_in=options["stand-in"],
            exchange_with=() if quick else _exchange_partners(options["exchange-with"], stack),
            complete=not (quick or only or filtered),
        )


@frozen
class _Options:
    """Options by their names, without the prefix that they have among others."""

    config: pytest.Config

    def __getitem__(self, name: str) -> Any:
        return self.config.getoption(f"accel_{name.replace('-', '_')}")


def _stack(options: _Options, project: Path) -> TestedStack:
    settings = dict(_setting(each) for each in options["set"])
    given = settings, options["network"], options["reference"]
    return TestedStack.parse(options["stack"], discover(), options["simulate"], str(project), *given)


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


def scenario(text: str, world: int, shared: Mapping[str, str]) -> Scenario:
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


def next_command(config: pytest.Config, failed: Sequence[Check]) -> str:
    """Return the command that runs the failed checks of the lowest level again.

    What fails at a level often makes others above it fail.
    """
    options, lowest = _Options(config), min(check.level for check in failed)
    names = [check.name for check in failed if check.level == lowest]
    words = ["accel", "plugins", "check", options["stack"]]
    for name in REPEATED:
        given = options[name]
        for value in given if isinstance(given, list) else [given]:
            words += [] if value is None else [f"--accel-{name}", str(value)]
    if len(names) > NAMED_ONE_BY_ONE:
        return shlex.join([*words, "--accel-level", str(lowest)])
    return shlex.join([*words, *(word for name in names for word in ("--accel-only", name))])
