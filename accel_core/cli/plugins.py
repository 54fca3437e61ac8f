"""`accel plugins`: installed plugins and their status; plugins may add commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import click

from accel_core.cli.group import Group
from accel_core.cli.terminal import print_table, say
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.card import SLOTS
from accel_core.contract.world import World
from accel_core.errors import AccelError, PluginError
from accel_core.plugins.discovery import (
    Discovery,
    Record,
    discover,
    environment_of,
    load,
    own_traceback,
    verify,
    visible_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

EXAMINED: Final = 80
"""Exit code of the doctor's child process if all checks have passed."""
CHOSEN: Final = {
    "device": "taken by `device: auto`; explicit names always get their plugin",
    "strategy": "taken by `strategy: auto` when there are several processes",
    "launcher": "`accel launch` here takes ",
}


@click.group(cls=Group, invoke_without_command=True)
@click.option(
    "--all", "everything", is_flag=True, help="List plugins that cannot be used here too, with the reason."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, with one object per plugin.")
@click.option("--why", is_flag=True, help="Explain which plugins would be chosen on this machine.")
@click.pass_context
def plugins(ctx: click.Context, everything: bool, as_json: bool, why: bool) -> None:
    """List the plugins that can be used here.

    --why explains the choice, `doctor` examines the installation of one plugin. With accel-testing,
    `check` runs the conformance tests on a plugin, and `new` writes a plugin.
    """
    if ctx.invoked_subcommand is not None:
        return
    discovery = discover()
    if as_json:
        print(json.dumps([_facts(record) for record in _ordered(discovery)], indent=2, default=sorted))
    else:
        say(*_explain(discovery)) if why else print_listing(discovery, everything=everything)


def _ordered(discovery: Discovery) -> list[Record]:
    return [record for slot in SLOTS for record in discovery.of(slot)]


def _facts(record: Record) -> dict[str, object]:
    facts = record.card._asdict() if record.card else {}
    facts.pop("probe", None)
    names = ("name", "slot", "status", "reason", "distribution", "version")
    return facts | {name: getattr(record, name) for name in names}


def print_listing(discovery: Discovery, *, everything: bool) -> None:
    """Print a row for each plugin: its origin, and its summary or the reason why it cannot be used.

    Args:
        discovery: the installed plugins.
        everything: print plugins that cannot be used too. False: only count them.
    """
    rows = [("NAME", "SLOT", "STATUS", "FROM", "SUMMARY, OR WHY NOT" if everything else "SUMMARY")]
    shown = [record for record in _ordered(discovery) if everything or record.status == "available"]
    for record in shown:
        about = record.reason or (record.card.summary if record.card else "")
        rows.append((record.name, record.slot, record.status, record.origin, about.splitlines()[0]))
    print_table(rows)
    if others := Counter(record.status for record in discovery.records if record not in shown):
        counts = ", ".join(f"{count} {status}" for status, count in others.items())
        say(f"\n{counts}: `accel plugins --all` says why")


def _explain(discovery: Discovery) -> Iterator[str]:
    for slot, how in CHOSEN.items():
        taken = _launcher() if slot == "launcher" else ""
        yield f"{slot}: {how}{taken}"
        yield from _verdicts(discovery, slot, taken)
    for record in _ordered(discovery):
        if record.fault:
            yield f"{record.name} ({record.origin}) is {record.fault}: {record.detail}"
            yield from (f"    {line}" for line in record.traceback.splitlines())


def _verdicts(discovery: Discovery, slot: str, taken: str) -> Iterator[str]:
    usable = [record for _, record in discovery.usable(slot)]
    for record in discovery.of(slot):
        if record.card is None:
            continue
        priority = record.card.priority
        if record.status != "available":
            verdict = f"cannot be used here: {record.reason}"
        elif record.name == taken:
            verdict = "taken here"
        elif priority is None:
            verdict = "usable, but only when named"
        elif taken:
            verdict = "usable, and not taken here"
        elif record not in usable:
            verdict = "usable, but another usable plugin stands in for it"
        else:
            verdict = _rank(record, usable)
        rank = "" if priority is None else f", priority {priority}"
        yield f"  {record.name} ({record.origin}{rank}): {verdict}"


def _launcher() -> str:
    """Return the launcher that `accel launch` would take here: an engine's inside its job, else torchrun."""
    from accel_core.launch.plan import plan

    try:
        return plan().allocated().config.launch.launcher
    except AccelError as error:  # in the config, or in the engine's job
        return f"none: {error}".partition("\n")[0]


def _rank(record: Record, usable: Sequence[Record]) -> str:
    """Return the verdict of `auto` on a plugin; `usable` has the best plugins first."""
    best = [it for it in usable if it.card and usable[0].card and it.card.priority == usable[0].card.priority]
    if record not in best:
        return "usable, of lower priority"
    rivals = ", ".join(it.name for it in best if it is not record)
    return f"tied with {rivals}: auto refuses to choose, name one" if rivals else "the first that is usable"


def _find(name: str) -> Record:
    discovery = discover()
    record = discovery.get(name)
    if record is None:
        hint = did_you_mean(name, [each.name for each in discovery.records])
        raise PluginError(f"no plugin {name!r} is installed{hint}\n`accel plugins` lists them", plugin=name)
    return record


@plugins.command()
@click.argument("name")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds until its imports count as hung.")
def doctor(name: str, timeout: float) -> None:
    """Import all parts of plugin NAME in a child process, and run its checks."""
    record = _find(name)
    say(f"{record.slot} {record.name}, {record.origin}: {record.status}")
    if record.reason:
        print(record.traceback or f"  {record.reason}", flush=True)
    if record.card is None:
        sys.exit(1)
    # In a child process, since a vendor's import may hang or end the process.
    code = f"from accel_core.cli.plugins import examine; examine({name!r})"
    try:
        ended = subprocess.run([sys.executable, "-c", code], timeout=timeout, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        say(f"  it did not finish within {timeout:g} s: the import above hangs")
        sys.exit(1)
    if ended.returncode == 0:
        say("  it ended the process: the import above calls os._exit")
    sys.exit(0 if ended.returncode == EXAMINED and record.status == "available" else 1)


def examine(name: str) -> None:
    """Import each path that a card names, in the doctor's child process; exit 1 at the first failure."""
    # late: slow to import, and not needed by listings
    from accel_core.contract.config import RunConfig
    from accel_core.plugins.tasks import ask

    record = _find(name)
    calls: dict[str, Callable[[], Any]] = {
        "task": lambda: ask(record),
        "launch_environment": lambda: environment_of(record, RunConfig(), World()),
        "visible_devices": lambda: visible_devices(record, RunConfig()),
    }
    for what in (*calls, "config", "hookspecs", "implementation", "verify"):
        path = getattr(record.card, what)
        if path is None:
            continue
        print(f"  {what}: {path} ... ", end="", flush=True)
        try:
            load(record, path)
            calls.get(what, lambda: None)()
            reason = verify(record) if what == "verify" else None
        except Exception as error:  # the plugin's code may raise anything
            cause = error.__cause__ if isinstance(error, PluginError) else error
            say("failed")
            print(own_traceback(cause or error, record.target, path))
            sys.exit(1)
        say(reason or "ok")
        if reason:
            sys.exit(1)
    sys.exit(EXAMINED)
