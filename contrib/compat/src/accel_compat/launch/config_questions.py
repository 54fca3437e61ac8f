"""`accelerate config`: a config file by questions, and `config update`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import click

from accel_compat.launch import config_file
from accel_compat.launch.commands import default_file
from accel_compat.launch.file_mistakes import unmet
from accel_compat.launch.request import DISTRIBUTED_TYPES, NO_STRATEGY
from accel_compat.launch.subcommands import LOST, subcommand_parser
from accel_compat.settings import STRATEGIES, WORDS, Setting, settings


def get_user_input() -> config_file.ClusterConfig:
    """Ask on the terminal what a config file of one's own machines says."""
    kinds = [*NO_STRATEGY, *dict.fromkeys(each for each in DISTRIBUTED_TYPES if each != "TPU")]
    kind = click.prompt("How is it to be trained", type=click.Choice(kinds), default="NO", show_choices=True)
    found: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "debug": False}
    machines = _ask(settings()["num_machines"], 1)
    if machines > 1:
        for name in ("machine_rank", "main_process_ip", "main_process_port"):
            found[name] = _ask(settings()[name])
    cpu = kind == "MULTI_CPU" or (kind == "NO" and click.confirm(settings()["cpu"].help, default=False))
    found |= {"num_machines": machines, "use_cpu": cpu}
    found["num_processes"] = 1 if kind == "NO" else _ask(settings()["num_processes"], 2)
    precision = click.Choice(WORDS["mixed_precision"])
    found["mixed_precision"] = click.prompt("Compute in", type=precision, default="no", show_choices=True)
    if click.confirm("Compile models by torch.compile?", default=False):
        found["dynamo_config"] = {"dynamo_backend": _ask(settings()["dynamo_backend"], "inductor")}
    switch = DISTRIBUTED_TYPES.get(kind)
    if switch in STRATEGIES:
        found[f"{switch.removeprefix('use_')}_config"] = _section(STRATEGIES[switch])
    return config_file.ClusterConfig(**found)


def _section(strategy: str) -> dict[str, Any]:
    """Ask for each option of a strategy, of FSDP's version 2 if none is named.

    What is left empty is not written.
    """
    rows = [row for row in settings().values() if row.owner == strategy and row.native_name is None]
    asked = [row for row in rows if row.variable.startswith(("FSDP_", "ACCELERATE_", "MEGATRON_LM_"))]
    found: dict[str, Any] = {}
    for row in asked:
        if found.get("fsdp_version") != "2" or row.name not in (*LOST, "fsdp_sharding_strategy"):
            found[row.name] = _ask(row, 2 if row.name == "fsdp_version" else None)
    return {name: value for name, value in found.items() if value is not None}


def _ask(row: Setting, default: Any = None) -> Any:
    """Ask until the answer is of the row's kind; None where it is left empty."""
    usual = row.default if default is None else default
    while True:
        said = click.prompt(f"{row.name}: {row.help}", default="" if usual is None else str(usual)).strip()
        if not said:
            return None
        if not (wanted := unmet(row, said)):
            return {"int": int, "float": float}.get(row.kind, str)(said)
        click.echo(f"{said!r} is not {wanted}")


def config_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `config`."""
    parser = subcommand_parser(subparsers, "config", "Write a config file by questions.", config_command)
    parser.add_argument("--config_file", "--config-file", help="Default: the one that `launch` reads")
    return parser


def config_command(args: Namespace) -> None:
    """Ask, and write the file."""
    file = str(args.config_file or config_file.default_config_file)
    _write(get_user_input(), file)
    print(f"accelerate configuration saved at {file}")  # noqa: T201  as there


def default_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `config default`."""
    about = "Write a config file with what this machine has."
    parser = subcommand_parser(subparsers, "default", about, _write_default)
    parser.add_argument("--config_file", "--config-file", help="Default: the one that `launch` reads")
    precisions = WORDS["mixed_precision"]
    parser.add_argument("--mixed_precision", "--mixed-precision", default="no", choices=precisions)
    return parser


def _write_default(args: Namespace) -> None:
    file = str(args.config_file or default_file())
    if path := config_file.write_basic_config(args.mixed_precision, file):
        print(f"accelerate configuration saved at {path}")  # noqa: T201  as there


def update_config(args: Namespace) -> str:
    """Write a file again, with the keys of this version; return its path.

    Raises:
        ValueError: it is not there.
    """
    file = str(args.config_file or config_file.default_config_file)
    if not Path(file).exists():
        raise ValueError(f"The passed config file located at {file} doesn't exist.")
    _write(config_file.load_config_from_file(file), file)
    return file


def update_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `config update`."""
    about = "Write a config file again, with the keys of this version."
    parser = subcommand_parser(subparsers, "update", about, update_config_command)
    parser.add_argument("--config_file", "--config-file", help="Default: the one that `launch` reads")
    return parser


def update_config_command(args: Namespace) -> None:
    """Update, and say so."""
    print(f"Successfully updated the configuration file at {update_config(args)}.")  # noqa: T201  as there


def _write(config: config_file.BaseConfig, file: str) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    (config.to_json_file if file.endswith(".json") else config.to_yaml_file)(file)
