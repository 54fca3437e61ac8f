"""Save and open checkpoints by `accel_core.storage` alone: by one process, without a run."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_core.errors import CheckpointError
from accel_core.storage.disk import Disk
from accel_core.storage.leaves import full_leaf
from accel_core.storage.opened import open_checkpoint
from accel_core.storage.protocols import Comm, Storage
from accel_core.storage.ranks import Alone
from accel_core.storage.saver import Saver
from accel_core.storage.series import Numbering, Series
from accel_core.storage.state import State
from accel_core.storage.tensors import Checkpoint


def members() -> dict[str, Any]:
    """What a manifest must say of a run."""
    world = {"size": 1, "readers": 1, "nodes": 1}
    return {"run_id": "run", "lineage": ["run"], "time": "2026-01-01T00:00:00+00:00", "world": world}


def series_in(folder: Storage, **options: Any) -> Series:
    return Series(lambda: Numbering(folder, "run", **options))


class Engine:
    """A saver of named tensors, and of plain data."""

    def __init__(self, comm: Comm | None = None) -> None:
        self.saver = Saver(comm or Alone())

    def save(
        self,
        place: Storage | None,
        tensors: dict[str, Tensor],
        shared: Any = None,
        *,
        series: Series | None = None,
        wait: bool = True,
    ) -> Storage:
        """Save in `place`, or as the next of a series."""

        def collect() -> State:
            state = State()
            for name, tensor in tensors.items():
                state.add(("unit", name), full_leaf(tensor))
            state.shared["value"] = state.encode(shared, "shared")
            state.members = members
            return state

        pending = self.saver.save(
            collect,
            series or series_in(Disk(Path("never-used"))),
            place,
            wait=wait,
            wait_for_previous_save=self.wait,
        )
        if wait:
            self.wait()
        return pending.place

    def wait(self) -> None:
        self.saver.wait()


def save(place: Storage, value: float, **options: Any) -> Storage:
    """Save one number twice: as a tensor, and as plain data."""
    return Engine().save(place, {"value": torch.full((5,), value)}, value, **options)


def load(place: Storage) -> tuple[dict[str, Tensor], Any]:
    """What was saved: all tensors, each block of which is verified, and the plain data."""
    with open_checkpoint(place) as opened:
        opened.verify(opened.blocks)
        checkpoint = Checkpoint.with_tensors(opened)
        tensors = {key: stored.tensor() for (unit, key), stored in checkpoint.tensors.items() if unit}
        return tensors, checkpoint.decode(checkpoint.state["value"], "shared")


def value_in(place: Storage) -> float:
    """The number that `save` saved, which a mixture of saves would not have everywhere."""
    tensors, plain = load(place)
    (value,) = {plain, *tensors["value"].tolist()}
    return value


# -- what processes do ------------------------------------------------------------------------------------


def save_beside_others(folder: str, saves: int) -> tuple[int, int]:
    """Save again and again on ranks 0 to 2, and read on rank 3, each by itself, until it has read some.

    Returns how many saves succeeded, and how many others came before; or reads, and different values.
    """
    place, rank = Disk(Path(folder)), int(os.environ["RANK"])
    others = Path(folder).parent
    if rank == 3:
        return _read_while(place, others)
    done = overtaken = 0
    while done < saves or not (others / "read").exists():
        try:
            save(place, rank * 1000.0 + done)
            done += 1
        except CheckpointError as error:
            if "while this save was written: another run" not in str(error):
                raise
            overtaken += 1
    (others / f"ended-{rank}").touch()
    return done, overtaken


def _read_while(place: Disk, others: Path) -> tuple[int, int]:
    values: list[float] = []
    while len([*others.glob("ended-*")]) < 3:
        try:
            values.append(value_in(place))
            if len({*values}) > 3:
                (others / "read").touch()
        except CheckpointError as error:
            if values or "is not a checkpoint" not in str(error):  # before the first commit there is none
                raise
            time.sleep(0.001)
    return len(values), len({*values})


def save_and_stop(folder: str, value: float) -> None:
    """Begin a save, and stand still between its files and its manifest until the process is killed."""
    from accel_core.storage import pending

    def stop(*given: object) -> None:
        Path(folder).parent.joinpath("standing").touch()
        time.sleep(1000)

    pending.commit = stop  # type: ignore[assignment]
    save(Disk(Path(folder)), value)
