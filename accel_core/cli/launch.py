"""`accel launch` and `accel submit`: start a script with the merged config."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin

import click

from accel_core.cli.commands import help_of_launch
from accel_core.cli.terminal import say
from accel_core.contract.options import options_of
from accel_core.errors import AccelError, ConfigError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from accel_core.contract.options import Option
    from accel_core.launch.plan import Launch


class _LaunchCommand(click.Command):
    """A command that accepts any `--section.option VALUE` as a flag for the config."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        dotted: list[click.Parameter] = [click.Option(names) for names in ctx.meta.get("dotted", ())]
        return super().get_params(ctx) + dotted

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [word.partition("=")[0] for word in args]
        flags = dict.fromkeys(word for word in words if word.startswith("--") and "." in word)
        ctx.meta["dotted"] = [(flag, f"dotted{index}") for index, flag in enumerate(flags)]
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise ConfigError(self._advise(error.option_name, ctx)) from None
        ctx.params.update({flag[2:]: ctx.params.pop(name) for flag, name in ctx.meta["dotted"]})
        return rest

    def _advise(self, flag: str, ctx: click.Context) -> str:
        from accel_core.contract.arguments import did_you_mean
        from accel_core.plugins.catalog import renamed_flag

        known = [spelling for option in self.get_params(ctx) for spelling in option.opts]
        about, old = f"{flag} is not a flag of accel {ctx.info_name}", renamed_flag(flag)
        if old:
            return f"{about}: {old}"
        return about + (did_you_mean(flag, known) or f"; `accel {ctx.info_name} --help` lists them all")

    def get_help(self, ctx: click.Context) -> str:
        """Return the text that tools/reference.py has written, which is faster than formatting the flags."""
        return help_of_launch(ctx.info_name or "")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("More options, before the script (--help-all lists them, and plugins')"):
            formatter.write_dl([(f"--{name}.OPTION VALUE", about) for name, about, _ in _core_sections()])


def _core_sections() -> list[tuple[str, str, type | None]]:
    """Return (name, summary, class) of core's sections."""
    from accel_core.config.sections import CORE

    sizes = ("parallelism", "Number of ranks along each dimension.", None)
    core = [(name, (cls.__doc__ or "").partition(" Section")[0], cls) for name, cls in CORE.items() if cls]
    return [sizes, *core]


def _value(option: Option) -> str:
    """Return the placeholder that help shows for the value of an option."""
    members = get_args(option.kind) if get_origin(option.kind) in (Union, UnionType) else (option.kind,)
    words = [*option.choices, *(word for it in members if get_origin(it) is Literal for word in get_args(it))]
    words = ["true", "false"] if bool in members else [getattr(word, "value", word) for word in words]
    words = ["INT"] * (int in members) + ["NUMBER"] * (float in members) + words
    if any(get_origin(it) is tuple for it in members):
        return "NAME,..."
    text = "|".join(map(str, words)) or option.name.rpartition("_")[2].upper()
    return f"[{text}]" if len(words) > 1 else text


def _show_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the options of core and of plugins that can run here, and the other plugins with the reason."""
    if not wanted:
        return
    from accel_core.config.parallelism import SECTION, about, dimensions
    from accel_core.config.sections import load_class
    from accel_core.plugins.discovery import discover

    sections, absent, found = _core_sections(), list[tuple[str, str]](), discover()
    for record in found.records:
        if record.card and record.card.config and record.status == "available":
            sections.append((record.name, record.card.summary, load_class(record)))
        elif record.card and record.card.config:
            absent.append((f"--{record.name}.OPTION", record.reason))
    formatter = ctx.make_formatter()
    for name, summary, cls in sections:
        options = [it for it in options_of(cls).values() if not it.python_only] if cls else []
        rows = [(f"--{name}.{it.name} {_value(it)}", it.sentence) for it in options]
        if name == SECTION:
            rows = [
                (f"--{name}.{each} INT", " ".join(f"{it.name}: {about(each, it)}" for it in records))
                for each, records in dimensions(found).items()
            ]
        with formatter.section(f"{name}: {summary.rstrip('.')}"):
            formatter.write_dl(rows or [("none", "")])
    with formatter.section("Plugins that cannot run here"):
        formatter.write_dl(absent or [("none", "")])
    print(help_of_launch(ctx.info_name or ""), formatter.getvalue(), sep="\n\n", end="")
    ctx.exit()


def _own_flags() -> list[click.Parameter]:
    """Return the flags of section `launch` and of the top level; other options have dotted flags."""
    from accel_core.contract.config import LaunchConfig, RunConfig

    top = {name: it for name, it in options_of(RunConfig).items() if it.help}
    options = {f"launch.{name}": it for name, it in options_of(LaunchConfig).items()} | top
    del options["strategies"], options["parallelism"]
    return [
        click.Option(
            ["-n"] * path.endswith("processes_per_node")
            + [f"--{path.rpartition('.')[2].replace('_', '-')}", path.replace(".", "__")],
            metavar=_value(option),
            help=option.help,
        )
        for path, option in options.items()
    ]


def _command(help_of_dry_run: str) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator for a command that takes the flags of section `launch`, and a script."""
    module = "SCRIPT is a module, as for python -m."
    file = "YAML file. Default: $ACCEL_CONFIG, else ./accel.yaml."
    params = [
        *_own_flags(),
        click.Option(["--config"], metavar="FILE", help=file),
        click.Option(["--dry-run"], is_flag=True, help=help_of_dry_run),
        click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show the options of all sections and plugins too.",
        ),
        click.Option(["-m", "module"], is_flag=True, help=module),
        click.Argument(["target"], metavar="SCRIPT [ARGS]...", nargs=-1, type=click.UNPROCESSED),
    ]
    settings = {"allow_interspersed_args": False}  # flags after the script are the script's own
    return click.command(
        cls=_LaunchCommand, params=params, options_metavar="[FLAGS]", context_settings=settings
    )


@_command("Print what would start, then exit.")
def launch(
    config: str | None, dry_run: bool, module: bool, target: tuple[str, ...], **options: str | None
) -> None:
    """Start a Python SCRIPT, or a module with -m, on one or many processes."""
    from accel_core.distributed.progress import show_progress
    from accel_core.launch.addresses import require_rendezvous
    from accel_core.launch.plan import NATIVE
    from accel_core.launch.worker import command

    planned, words, again = _planned(config, module, target, options)
    planned = planned.allocated()
    section = planned.config.launch
    if planned.launcher_offers("named_rendezvous"):  # other launchers find the address themselves
        require_rendezvous(section.nodes, section.rendezvous)
    if dry_run:
        _describe(planned, words, again, submits=False)
    missing = [*_missing(planned)]
    if missing and section.launcher == NATIVE:  # other launchers' machines may have it
        raise LaunchError("\n".join([*missing, "install it, or choose another: `accel plugins` lists them"]))
    if dry_run:
        return
    with show_progress("loading torch"):  # to count devices
        hooks, processes = planned.launcher(), planned.processes()
    shown = processes or "auto"
    if planned.allocation is None or section.node_rank == 0:  # once per job, not per node
        notes = (f"accel: {note}" for note in [*_training_alone(planned), *missing])
        line = planned.line(shown) + "; loading torch ..." * sys.stderr.isatty()
        print(*notes, line, sep="\n", file=sys.stderr, flush=True)
    code = hooks.launch(planned.job(command(words), processes, again))
    sys.exit(code & 0xFF or int(code != 0))  # the system keeps 8 bits: 256 would be a success


@_command("Print what would be written and sent, then exit.")
def submit(
    config: str | None, dry_run: bool, module: bool, target: tuple[str, ...], **options: str | None
) -> None:
    """Hand a Python SCRIPT, or a module with -m, to a scheduler to start it later."""
    planned, words, again = _planned(config, module, target, options)
    name, hooks = planned.config.launch.launcher, planned.launcher()
    if not hooks.implementations("submit"):
        raise LaunchError(
            f"launcher {name} starts workers on this machine, and cannot submit a job\n"
            "name a launcher that can, by --launcher, or use `accel launch`",
            exit_code=2,
        )
    node = planned.config.launch.node_rank
    if node:
        raise LaunchError(
            f"launch.node_rank {node} was asked for, and a job that is handed over has one command for all"
            " nodes\nleave it out: its launcher numbers them",
            exit_code=2,
        )
    if dry_run:
        _describe(planned, words, again, submits=True)
        return
    submitted = hooks.submit(planned.job((), _asked(planned), again))
    rows = {"job": submitted.id, "watch": submitted.watch, "cancel": submitted.cancel, "logs": submitted.logs}
    say(*(f"{title}: {text}" for title, text in rows.items() if text))


def _planned(
    config: str | None, module: bool, target: tuple[str, ...], options: Mapping[str, str | None]
) -> tuple[Launch, tuple[str, ...], tuple[str, ...]]:
    """Return the launch, the script's command line, and the command line of `accel launch` for all of it."""
    from accel_core.launch.plan import plan

    flags = [(name.replace("__", "."), value) for name, value in options.items() if value is not None]
    planned = plan(flags=flags, file=config)
    _refuse_missing(target, module)
    for note in planned.resolved.notes:
        print(f"accel: {note}", file=sys.stderr)
    words = (*(("-m",) if module else ()), *target)
    file = planned.resolved.file
    given = [f"--config={Path(file).absolute()}"] if file else []
    given += [f"--{path if '.' in path else path.replace('_', '-')}={value}" for path, value in flags]
    return planned, words, (sys.executable, "-m", "accel_core", "launch", *given, *words)


def _training_alone(planned: Launch) -> Iterator[str]:
    """Yield a note on variables of other launchers that mean more ranks than this launch starts."""
    if planned.config.launch.nodes > 1:
        return
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    is_started = {"TORCHELASTIC_RUN_ID", "ACCEL_LAUNCH_CONFIG"} & os.environ.keys()
    if rank is not None and size.isdecimal() and int(size) > 1 and not is_started:
        found = f"RANK={rank} and WORLD_SIZE={size} are set, as in a rank, so this launch trains alone"
        yield f"{found}; to join the others, unset both (env -u RANK -u WORLD_SIZE)"
    nodes = os.environ.get("PET_NNODES", "1")
    if planned.allocation is None and nodes.rpartition(":")[2] != "1":
        found = (
            f"PET_NNODES={nodes} is set, which only torchrun reads, so this launch trains on this node alone"
        )
        yield f"{found}; to join the others, give --nodes, --node-rank and --rendezvous"


def _missing(planned: Launch) -> Iterator[str]:
    """Yield a line for each plugin or store that the config names and this machine cannot use."""
    from accel_core.checkpoint.places import storage_at

    device = planned.config.device.partition(":")[0]
    for path, slot, name in ((("device",), "device", device), *planned.config.plugin_names()):
        answers = planned.discovery.answering(slot, name)  # empty if only torch knows the device
        if slot != "launcher" and answers and all(record.status != "available" for record in answers):
            origin = planned.resolved.origins.get(".".join(path), slot)
            yield f"{origin}: {slot} {name} cannot be used here: {answers[0].reason}"
    try:
        storage_at(planned.config.project.project_dir or ".")
    except AccelError as error:
        yield f"project.project_dir: {error}"


def _asked(planned: Launch) -> int:
    asked = planned.config.launch.processes_per_node
    return 0 if asked == "auto" else asked


def _describe(planned: Launch, words: Sequence[str], again: Sequence[str], *, submits: bool) -> None:
    """Print the workers that would be started, and the launcher's own description, if it has one."""
    from accel_core.launch.worker import command

    say(planned.line(planned.config.launch.processes_per_node))
    say(f"each worker: {shlex.join((sys.executable, *words))}")
    say(*(f"  {path}: {origin}" for path, origin in sorted(planned.resolved.origins.items())))
    say(*planned.option_notes())
    hooks = planned.launcher()
    if hooks.implementations("preview"):
        processes = _asked(planned) if submits else planned.processes()
        job = planned.job(() if submits else command(words), processes, again)
        print(hooks.preview(job, submits), flush=True)


def _refuse_missing(target: tuple[str, ...], module: bool) -> None:
    if not target:
        remedy = "name a script: accel launch [FLAGS] script.py [ARGS]"
        raise LaunchError(f"nothing to launch\n{remedy}", exit_code=2)
    if not module and not Path(target[0]).is_file():
        about = f"there is no script {target[0]} in {Path.cwd()}"
        raise LaunchError(f"{about}\nname a Python file, or a module with -m", exit_code=2)
