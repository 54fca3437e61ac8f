"""Detection of an engine's task in this process, by the functions that launchers' cards name.

`tasks.json` holds variables of engines, for launchers that are not installed or cannot answer. These show
that a process is a task among several. No code depends on a name in this data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from attrs import evolve

from accel_core.contract.world import Task
from accel_core.errors import LaunchError
from accel_core.plugins.catalog import catalog_entry, install_hint
from accel_core.plugins.discovery import load

if TYPE_CHECKING:
    from accel_core.plugins.discovery import Discovery, Record


def task_here(discovery: Discovery) -> Task | None:
    """Return this process's task, from the first launcher that detects it; None outside of engines."""
    answering = set(discovery.names)
    for record in discovery.of("launcher"):
        try:
            task = ask(record) if not record.fault and record.card and record.card.task else None
        except Exception:  # perhaps nobody chose this launcher: only `accel plugins doctor` reports the fault
            answering.discard(record.name)
            continue
        if isinstance(task, Task):
            return evolve(task, launcher=record.name)
    return _by_data(os.environ, answering)


def refuse_lone_task(task: Task | None, discovery: Discovery, nodes: int = 1) -> None:
    """Refuse to run if an engine started several tasks that do not know of each other.

    Args:
        task: the task of this process.
        discovery: the installed plugins.
        nodes: nodes of the job, as configured; one task per node is allowed.

    Raises:
        LaunchError: an engine started several tasks, and torchrun's variables are not set.
    """
    if task is None or {"RANK", "WORLD_SIZE"} <= os.environ.keys():  # batch scripts export WORLD_SIZE alone
        return
    if task.size == nodes if task.size > 1 else not task.rank or nodes > 1:
        return
    found = (
        f"{task.size} tasks ({task.variable})"
        if task.size > 1
        else f"several tasks ({task.variable}={task.rank})"
    )
    would = "train alone" if nodes == 1 else f"be a launcher of {nodes} nodes"
    by_hand = "start one task per node, running `accel launch --nodes N --node-rank I --rendezvous HOST:PORT`"
    entry = catalog_entry(task.launcher)
    if task.launcher in discovery.names:
        remedy = f"start each as `accel launch --launcher {task.launcher} SCRIPT`, which joins them"
    elif entry is not None:
        remedy = f"the launcher {entry.name} joins them ({install_hint(entry.folder)}); without it {by_hand}"
    else:
        remedy = by_hand
    raise LaunchError(
        f"this is one of {found}, and each would {would}: RANK and WORLD_SIZE are not set\n"
        f"{remedy}; or, if training alone is meant, set RANK=0 WORLD_SIZE=1"
    )


def ask(record: Record) -> object:
    """Return the result of the function `task` of a launcher's card, which may raise any error."""
    assert record.card is not None
    assert record.card.task is not None
    return load(record, record.card.task)(os.environ)


def _by_data(environment: Mapping[str, str], answering: set[str]) -> Task | None:
    """Return the task that engines' variables describe, if there are several tasks.

    Args:
        environment: variables.
        answering: launchers whose own function has answered, so that their variables are skipped.
    """
    sizes, ranks = (
        [
            (int(environment[name]), name, launcher)
            for name, launcher in names.items()
            if environment.get(name, "").isdecimal() and launcher not in answering
        ]
        for names in _data()
    )
    for size, name, launcher in sizes:
        if size > 1:
            return Task(size=size, variable=name, launcher=launcher)
    for rank, name, launcher in ranks:
        if rank > 0:
            return Task(rank=rank, variable=name, launcher=launcher)
    return None


@cache
def _data() -> tuple[Mapping[str, str], Mapping[str, str]]:
    data = json.loads(files(__package__).joinpath("tasks.json").read_text("utf-8"))
    return data["sizes"], data["ranks"]
