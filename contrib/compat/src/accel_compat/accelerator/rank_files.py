"""Each rank's random streams and loaders, beside a checkpoint of rank 0 alone.

Each rank that calls `save_state` leaves a file beside the checkpoint. It counts on a load if it is of this
very moment of training, on all ranks; else the streams start anew, as core derives them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from accel_core import PreparedLoader, Run

_logger = logging.getLogger("accelerate.checkpointing")
_SAMPLE = 4096
"""Elements of a model's last parameter that tell moments of training apart."""


def write(run: Run, target: Path) -> None:
    """Leave this rank's file beside the checkpoint `target`. Not collective."""
    file = _file(target, run.world.rank)
    file.parent.mkdir(parents=True, exist_ok=True)
    streams = {name: stream.get().cpu().contiguous() for name, stream in run.hooks.random_streams().items()}
    own = {"moment": _moment(run), "loaders": [loader.state_dict() for loader in run.prepared.loaders]}
    beside = file.with_suffix(f".{os.getpid()}")
    save_file(streams, beside, metadata={"own": json.dumps(own)})
    os.replace(beside, file)
    if run.world.rank == 0:
        for each in file.parent.glob(".*.rank-00000.states"):  # of checkpoints that were removed
            name = each.name[1:].rpartition(".rank-")[0]
            if name != target.name and not (file.parent / name).exists():
                for left in file.parent.glob(f".{glob.escape(name)}.rank-*.states"):
                    left.unlink(missing_ok=True)


@contextmanager
def told_here(alone: bool) -> Iterator[None]:
    """Silence a load's message about another world size.

    `read` handles the random streams that the message is about.
    """

    def other(record: logging.LogRecord) -> bool:
        return "world" not in record.getMessage()

    logger = logging.getLogger("accel_core.checkpoint.problems")
    if alone:
        logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def same_moment(run: Run, target: Path, rank: int) -> bool:
    """Tell whether that rank's file is of this run's current moment."""
    return _opened(run, target, rank) is not None


def read(run: Run, loaded: Path) -> None:
    """Restore the ranks' files, if all ranks left one at this checkpoint. Collective."""
    found = _opened(run, loaded, run.world.rank)
    if all(run.collectives("control").all_gather_object(found is not None)):
        loaders, streams = found or ([], {})
        for loader, position in zip(run.prepared.loaders, loaders, strict=True):
            loader.load_state_dict(position)
        for name, stream in run.hooks.random_streams().items() if streams else ():
            stream.set(streams[name])
    elif run.world.rank == 0:
        _logger.warning("%s was saved by one rank alone: random streams start anew", loaded)


def _file(target: Path, rank: int) -> Path:
    target = Path(os.path.realpath(target))
    return target.parent / f".{target.name}.rank-{rank:05d}.states"


def _opened(run: Run, target: Path, rank: int) -> tuple[list[Any], dict[str, torch.Tensor]] | None:
    """Read (loader positions, random streams) if the file is of the current moment."""
    file = _file(target, rank)
    try:
        with safe_open(file, "pt") as opened:
            own: dict[str, Any] = json.loads(opened.metadata()["own"])
            streams = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError):  # it was not called there, or is being replaced
        return None
    fits = own["moment"] == _moment(run) and streams.keys() == run.hooks.random_streams().keys()
    return (own["loaders"], streams) if fits else None


def _moment(run: Run) -> str:
    """Return a digest of the moment of training, which each step and batch change.

    It is alike on all ranks, as far as their weights are.
    """
    told = hashlib.blake2b(json.dumps([run.world.size, [*map(_place, run.prepared.loaders)]]).encode())
    for model in (model for unit in run.units for model in unit.models):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained[-1:]:
            sample = parameter.detach().flatten()[:_SAMPLE].cpu().contiguous()
            told.update(sample.view(torch.uint8).numpy().tobytes())
    return told.hexdigest()


def _place(loader: PreparedLoader) -> list[int]:
    """(epoch, consumed); the end of an epoch is the start of the next."""
    state = loader.state_dict()
    ended = state["ended"] or (state["length"] is not None and state["consumed"] >= state["length"])
    return [state["epoch"] + 1, 0] if ended else [state["epoch"], state["consumed"]]
