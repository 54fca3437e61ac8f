"""Process-wide state of megatron-core: its groups of ranks and random streams."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen

from accel_core import ConfigError, join_process_group, leave_process_group

if TYPE_CHECKING:
    from accel_core import Run
    from accel_megatron.config import Sized

__all__ = ["Layout", "enter", "leave", "own_streams", "quiet", "unusable"]


@frozen
class Layout:
    """Division of the ranks of a world."""

    tp: int
    pp: int
    ep: int
    virtual: int | None = None

    @classmethod
    def of(cls, config: Sized, virtual: int | None) -> Layout:
        """Return the layout that the config asks for, with `virtual` chunks a rank."""
        return cls(
            config.tp,
            config.pp,
            config.ep,
            virtual,
        )

    def __str__(self) -> str:
        return (
            " × ".join(f"{name} {size}" for name, size in asdict(self).items() if size not in (None, 1))
            or "1"
        )


_users: dict[int, tuple[Layout, str]] = {}
"""Identity of a plugin with models -> its layout, and the run that it is of."""


def enter(run: Run, user: object, layout: Layout) -> None:
    """Have megatron-core divide the ranks like this, until `leave(user)`. Collective.

    Raises:
        ConfigError: another run of this process has divided them otherwise.
    """
    for other, name in _users.values():
        if other != layout:
            raise ConfigError(
                f"this run wants megatron-core to divide the ranks into {layout}, but run {name} of this"
                f" process has divided them into {other}, and megatron-core can do it once at a time\n"
                "give both runs the same degrees, or end the first: accelerator.end_training()"
            )
    # Of its own use of itself and of torch, in each step.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("default", r".*CUDA_DEVICE_MAX_CONNECTIONS", module=r"megatron\.core\.")
    renamed = r"`torch\.distributed\.\w+` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    join_process_group(run, user)
    if not _users:
        with quiet():
            _initialize(run, layout)
    _users[id(user)] = layout, run.run_id


def _initialize(run: Run, layout: Layout) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.virtual,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp if layout.ep == 1 else 1,
    )
    # Streams for split tensors, and for tensors that the ranks of a layer share, which draw the same dropout,
    # so the seed is rank 0's, though nobody may have set one.
    seed = run.collectives("control").broadcast_object(torch.initial_seed() % 2**31)
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


@contextmanager
def own_streams(device: torch.device) -> Iterator[None]:
    """Keep this process's streams, which `enter` seeds alike on data-parallel ranks."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        yield


def leave(user: object) -> None:
    """Forget a user without a model; the last one takes the groups along."""
    if _users.pop(id(user), None) is not None and not _users:
        from megatron.core import parallel_state

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
    leave_process_group(user)


def unusable() -> str | None:
    """Why megatron-core cannot work in this process, if it cannot."""
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch's errors without CUDA, and without a device
        return (
            f"megatron-core calls torch.cuda wherever it runs, which does not work here: {error}\n"
            "start on a machine with CUDA devices, or choose strategy fsdp (tp, pp) or ddp"
        )
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of megatron-core's imports and of its use of torch.

    No user can change the code that they are about.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def part(group: Any) -> tuple[int, int]:
    """Return (this rank's number, ranks) of a group."""
    return dist.get_rank(group), dist.get_world_size(group)
