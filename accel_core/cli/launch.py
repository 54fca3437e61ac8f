"""`accel launch`: the merged config, the number of workers, and the launcher that starts them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from attrs import define, field

from accel_core.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from accel_core.launching import Launch

__all__ = ["launch"]

FLAGS: Final = {
    "-n/--processes-per-node": "launch.processes_per_node",
    "--nodes": "launch.nodes",
    "--node-rank": "launch.node_rank",
    "--rendezvous": "launch.rendezvous",
    "--max-restarts": "launch.max_restarts",
    "--launcher": "launch.launcher",
    "--device": "device",
    "--strategy": "strategy",
    "--mixed-precision": "mixed_precision",
}
"""Own flags -> the options they set, whose help they show."""


@define
class _Line:
    """A command line taken apart: own flags, dotted flags, and what is to be run."""

    own: list[str] = field(factory=list)
    dotted: dict[str, str] = field(factory=dict)
    target: list[str] = field(factory=list)
    problems: list[str] = field(factory=list)


class _LaunchCommand(click.Command):
    """Flags end where the script begins: what follows is the script's, whatever it looks like."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {spelling: option for option in self.get_params(ctx) for spelling in option.opts}
        line = _take_apart(list(args), known)
        if line.problems:
            raise ConfigError("\n".join(line.problems), problems=line.problems)
        rest = super().parse_args(ctx, line.own)
        ctx.params.update(dotted=line.dotted, target=line.target)
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from accel_core.plugins import discover

        rows = [
            (f"--{record.name}.OPTION VALUE", record.card.summary)
            for record in discover().records
            if record.card is not None and record.card.config is not None
        ]
        if rows:
            with formatter.section(
                "Options of plugins, before the script (accel config schema NAME lists them)"
            ):
                formatter.write_dl(rows)


def _take_apart(args: list[str], known: Mapping[str, click.Parameter]) -> _Line:
    line = _Line()
    while args:
        word = args.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--", "-", "-m") or not word.startswith("-"):
            line.target = args if word == "--" else [word, *args]
            break
        option = known.get(name) or (None if word.startswith("--") else known.get(word[:2]))
        if option is not None:
            attached = equals or name not in known  # --nodes=2, -n2
            values = 0 if attached or getattr(option, "is_flag", False) else 1
            line.own += [word, *args[:values]]
        elif "." in name:
            values = 0 if equals else 1
            line.dotted[name.lstrip("-")] = value if equals else "".join(args[:1])
        else:
            advice, values = _advise(name, known)
            line.problems.append(f"{name} is no flag of accel launch{advice}")
        del args[: 0 if equals else values]
    return line


def _advise(flag: str, known: Mapping[str, click.Parameter]) -> tuple[str, int]:
    """What to use instead of an unknown flag, and how many values it probably has."""
    from accel_core.known import old_flag
    from accel_core.plugins import near

    spelling = flag.replace("_", "-")
    if spelling in known:
        return f"; write {spelling}", 0 if getattr(known[spelling], "is_flag", False) else 1
    old = old_flag(flag)
    if old is not None:
        return f": {old.advice}", old.takes
    return near(spelling, list(known)) or "; `accel launch --help` lists them all", 0


def _own_flags() -> list[click.Parameter]:
    from attrs import fields_dict

    from accel_core.config.options import describe
    from accel_core.config.schema import LaunchConfig, RunConfig

    options = {**fields_dict(RunConfig), **fields_dict(LaunchConfig)}
    return [
        click.Option(flag.split("/"), metavar="VALUE", help=describe(options[path.rpartition(".")[2]]).help)
        for flag, path in FLAGS.items()
    ]


@click.command(cls=_LaunchCommand, params=_own_flags(), options_metavar="[FLAGS] SCRIPT [ARGS]...")
@click.option("--config", metavar="FILE", help="Else $ACCEL_CONFIG, else ./accel.yaml if there is one.")
@click.option("--dry-run", is_flag=True, help="Say what would be started, and start nothing.")
def launch(
    config: str | None, dry_run: bool, dotted: dict[str, str], target: list[str], **own: str | None
) -> None:
    """Start a Python SCRIPT, or a module with -m MODULE, on one or many processes."""
    from accel_core.config.resolve import load
    from accel_core.launching import Launch
    from accel_core.plugins import discover

    paths = {path.rpartition(".")[2]: path for path in FLAGS.values()}
    flags = {paths[name]: value for name, value in own.items() if value is not None}
    discovery = discover()
    resolved = load(flags={**dotted, **flags}, file=config, discovery=discovery)
    _refuse_missing(target)
    for note in resolved.notes:
        print(f"accel: {note}", file=sys.stderr)
    command = (sys.executable, "-u", "-m", "accel_core.worker", *target)
    plan = Launch(resolved, discovery)
    if dry_run:
        _describe(plan, command)
        return
    sys.exit(_start(plan, command))


def _start(plan: Launch, command: tuple[str, ...]) -> int:
    hooks = plan.launcher()
    processes = plan.processes()
    print(plan.line(processes), file=sys.stderr, flush=True)
    with plan.job(command, processes) as job:
        return int(hooks.launch(job))


def _describe(plan: Launch, command: tuple[str, ...]) -> None:
    plan.refuse_misnamed()
    print(plan.line(plan.config.launch.processes_per_node))
    print(f"each worker: {shlex.join(command)}")
    for path, origin in sorted(plan.resolved.origins.items()):
        print(f"  {path}: {origin}")
    for doubt in plan.doubts():
        print(doubt)


def _refuse_missing(target: list[str]) -> None:
    if not target or target == ["-m"]:
        raise LaunchError(
            "nothing to launch\nname a script: accel launch [FLAGS] script.py [ARGS]", exit_code=2
        )
    if target[0] != "-m" and not Path(target[0]).is_file():
        found = "is a folder" if Path(target[0]).is_dir() else f"does not exist in {Path.cwd()}"
        raise LaunchError(
            f"the script {target[0]} {found}\nname a Python file, or a module with -m", exit_code=2
        )
