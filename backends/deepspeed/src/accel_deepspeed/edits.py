"""Weights that the user edits in place between steps.

The optimizer inside steps copies of them, so the next step would undo an edit in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist

from accel_core import AccelError
from accel_deepspeed.optimizer_shards import fragments, live_part

if TYPE_CHECKING:
    from torch import Tensor

    from accel_core import Unit

__all__ = ["Edits", "edits_of", "keep_written", "note_own_loads", "refuse_groups", "refuse_own_state"]

_WORDS: Final = 1024
"""Words of 8 bytes in a row of which a fingerprint has the sum."""


def edits_of(unit: Unit) -> Edits | None:
    """Return the object that sees edits of a unit's weights.

    None if the optimizer steps the weights themselves.
    """
    engine: Any = unit.wrapped[0]
    name = type(engine.optimizer).__name__
    if name == "DeepSpeedZeroOptimizer_Stage3":
        return PartitionedWeights(unit, engine.optimizer)
    return WholeWeights(unit, engine.optimizer) if name in _LIVE else None


class WholeWeights:
    """Weights of stages 0 to 2, where forward's weights are whole.

    The next step starts from edited weights. Each rank takes over its own share. The weights' bits are
    compared with those after the last step, because an edit of `parameter.data` counts no version.
    """

    def __init__(self, unit: Unit, optimizer: Any) -> None:
        self._unit, self._optimizer = unit, optimizer
        self._parameters = list(dict.fromkeys(part.parameter for part in fragments(unit)))
        self._dtypes = [parameter.dtype for parameter in self._parameters]
        self._addresses = self._find()
        self.note()

    def note(self) -> None:
        """Take the weights for unedited, after a step."""
        if self._find() != self._addresses:  # `parameter.data = tensor`
            self._lay_out()
            self._addresses = self._find()
        self._bits = [_fingerprint(flat) for flat in self._live()]

    def take_over(self) -> None:
        """Write edited weights into the copies that are stepped.

        Raises AccelError for weights of another dtype now, which a step would take back.
        """
        _refuse_converted(zip(self._parameters, self._dtypes, strict=True))
        pairs = zip(self._live(), self._bits, strict=True)
        if self._find() != self._addresses or not all(torch.equal(_fingerprint(x), y) for x, y in pairs):
            keep_written(self._unit, self._unit.named_parameters().keys())

    def _find(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def _live(self) -> Sequence[Tensor]:
        return _LIVE[type(self._optimizer).__name__](self._optimizer)

    def _lay_out(self) -> None:
        """Make the parameters views of the flat tensors again.

        The other optimizers do it in each step.
        """
        if type(self._optimizer).__name__ == "BF16_Optimizer":
            groups = zip(self._optimizer.bf16_groups, self._optimizer.bf16_groups_flat, strict=True)
            for parameters, flat in groups:
                self._optimizer._update_storage_to_flattened_tensor(parameters, flat)


class PartitionedWeights:
    """Weights of stage 3, where most are empty between steps.

    An edit is an error that names one. The edit of an empty weight changes nothing but its version. Small
    weights are whole copies of their partitions, and their bits are compared too.
    """

    def __init__(self, unit: Unit, optimizer: Any) -> None:
        self._named = unit.named_parameters()
        self._dtypes = [parameter.dtype for parameter in self._named.values()]
        self._small: Sequence[Any] = optimizer.persistent_parameters
        self.note()

    def note(self) -> None:
        """Take the weights for unedited.

        Called after a step, a load, or a context that gathers them.
        """
        self._versions, self._bits = self._count(), self._fingerprint_small()

    def take_over(self) -> None:
        """Raise AccelError for weights edited outside such a context, or converted."""
        _refuse_converted(zip(self._named.values(), self._dtypes, strict=True))
        now = zip(self._named, self._count(), self._versions, strict=True)
        edited = [name for name, version, noted in now if version != noted]
        bits = self._fingerprint_small()
        if not edited and bits.shape == self._bits.shape and not torch.equal(bits, self._bits):
            small = set(map(id, self._small))
            edited = [name for name, parameter in self._named.items() if id(parameter) in small]
        if edited:
            raise AccelError(
                f"DeepSpeed: weights were edited in place, {', '.join(edited[:8])} or some of them; ZeRO's"
                " stage 3 keeps weights in partitions, so the next step would undo it\n"
                "edit them inside accelerator.full_parameters(model, writeback=True)"
            )

    def _count(self) -> list[int]:
        return [parameter._version for parameter in self._named.values()]

    def _fingerprint_small(self) -> Tensor:
        small = [parameter.detach().view(-1) for parameter in self._small]
        return _fingerprint(torch.cat(small)) if small else torch.empty(0)


def _refuse_converted(weights: Iterable[tuple[Tensor, torch.dtype]]) -> None:
    for parameter, dtype in weights:
        if parameter.dtype != dtype:
            shape = list(getattr(parameter, "ds_shape", parameter.shape))
            raise AccelError(
                f"DeepSpeed: a weight of shape {shape} was converted from {dtype} to {parameter.dtype} after"
                " prepare, and its engine would take that back\nconvert the model before prepare"
            )


Edits = WholeWeights | PartitionedWeights


def note_own_loads(engine: Any, edits: Edits) -> None:
    """Take weights that the engine's own `load_checkpoint` has written for unedited.

    transformers' Trainer resumes by it.
    """
    load = engine.load_checkpoint

    @wraps(load)
    def load_and_note(*args: Any, **options: Any) -> Any:
        loaded = load(*args, **options)
        edits.note()
        return loaded

    engine.load_checkpoint = load_and_note


def refuse_own_state(optimizer: Any) -> None:
    """Refuse a state that is given back to a ZeRO optimizer.

    It loads a list of all ranks' states. One of another rank would be taken for this one's.
    """
    load = optimizer.load_state_dict

    @wraps(load)
    def load_list(*states: Any, **options: Any) -> Any:
        if states and isinstance(states[0], Mapping):
            raise AccelError(
                "DeepSpeed: load_state_dict of an optimizer whose state each rank has a share of; its engine"
                " does not take it back\n"
                "use accelerator.save_state and load_state; to change rates, write into param_groups"
            )
        return load(*states, **options)

    optimizer.load_state_dict = load_list


def refuse_groups(optimizer: Any) -> None:
    """Refuse groups that are added to an optimizer of DeepSpeed's, which takes none."""

    def add_param_group(group: Mapping[str, Any]) -> NoReturn:
        raise AccelError(
            "DeepSpeed: add_param_group: its engine steps the groups that the optimizer had in prepare\n"
            "group parameters before prepare, or call accelerator.free_memory() and prepare again"
        )

    if not hasattr(optimizer, "add_param_group"):
        optimizer.add_param_group = add_param_group


@torch.no_grad()
def keep_written(unit: Unit, names: Collection[str]) -> None:
    """Write these weights, as forward has them, into the copies that are stepped.

    Elements that were not edited keep the digits that forward's copy has no place for.
    """
    for fragment in fragments(unit):
        if fragment.name in names:
            master = fragment.cut(fragment.flat)
            written = live_part(fragment).to(master.device)
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.to(master.dtype)))


def _fingerprint(tensor: Tensor) -> Tensor:
    """Return sums over rows and columns of the bits of a contiguous tensor.

    The bits are read as words of 8 bytes, on the tensor's device, without a copy. The ends that fill no row
    are there themselves.
    """
    raw = tensor.detach().view(-1).view(torch.uint8)
    begin = min(-raw.storage_offset() % 8, raw.numel())
    end = begin + (raw.numel() - begin) // (8 * _WORDS) * (8 * _WORDS)
    words = raw[begin:end].view(torch.int64).view(-1, _WORDS)
    return torch.cat([words.sum(0), words.sum(1), raw[:begin].long(), raw[end:].long()])


def _own_shares(optimizer: Any, groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return of each group, cut by rank, the part of this rank."""
    ranks = map(dist.get_rank, optimizer.real_dp_process_group)
    return [shares[rank] for shares, rank in zip(groups, ranks, strict=True)]


_LIVE: Final[Mapping[str, Callable[[Any], Sequence[Tensor]]]] = {
    "FP16_UnfusedOptimizer": lambda optimizer: [p for group in optimizer.fp16_groups for p in group],
    "FP16_Optimizer": lambda optimizer: optimizer.fp16_groups_flat,
    "BF16_Optimizer": lambda optimizer: _own_shares(optimizer, optimizer.bf16_partitioned_groups),
    "DeepSpeedZeroOptimizer": lambda optimizer: _own_shares(
        optimizer, optimizer.parallel_partitioned_bit16_groups
    ),
}
"""Optimizer -> the weights of forward that this rank steps copies of."""
