"""The extension `replicas`: it compares the contents of replicas every few steps, by checksums."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from accel_core import AccelError, hooks, implements

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_core import Collectives, Run, Unit
    from accel_monitor.config import ReplicasConfig

__all__ = ["Replicas", "checksum", "sums"]

_CHUNK: Final = 1 << 22
"""Words of 8 bytes that a device adds up at a time."""
_SCATTER: Final = ((-0x61C8864680B583EB, 30), (-0x40A7B892E31B1A47, 27), (-0x6B2FB644ECCEEE15, 31))
"""(factor, bits to shift) of each round that scatters whole numbers over 64 bits."""
_NAMED: Final = 10

Part = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A box of a leaf: the leaf's key, offset and shape."""


class Replicas:
    """Raises on all ranks once parts of the state that should be the same on several are not."""

    def __init__(self, config: ReplicasConfig, run: Run) -> None:
        self.config, self.run = config, run
        self._steps: Counter[Unit] = Counter()
        self._holders: dict[Unit, tuple[Sequence[str], Mapping[Part, tuple[int, ...]]]] = {}
        """Unit -> digest of the parts of each rank, and the ranks that hold each part."""

    @implements(hooks.after_step)
    def after_step(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        self._steps[unit] += 1
        is_due = self._steps[unit] % self.config.every == 0
        # Ranks whose gradients are not reduced (LocalSGD) differ by right.
        if is_due and self.run.world.size > 1 and not unit.is_in_no_sync:
            self.compare(unit)

    def compare(self, unit: Unit) -> None:
        """Compare the unit's replicas. Collective: three rounds of small messages.

        Raises:
            AccelError: the ranks that hold a part have different contents. On all ranks.
        """
        control, here = self.run.collectives("control"), replicated_parts(unit)
        holders = self._agree(control, unit, here)
        together: dict[str, list[Tensor]] = defaultdict(list)
        for part in sorted(here.keys() & holders.keys()):
            together[repr(holders[part])].append(here[part])
        found: dict[str, set[str]] = defaultdict(set)
        for told in control.all_gather_object({ranks: checksum(each) for ranks, each in together.items()}):
            for ranks, sums in told.items():
                found[ranks].add(sums)
        if any(len(sums) > 1 for sums in found.values()):
            _name_differences(control, unit, {part: here[part] for part in here.keys() & holders.keys()})

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        return [f"replicas compares what several ranks hold, every {self.config.every} optimizer step(s)"]

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        self._steps.pop(unit, None)
        self._holders.pop(unit, None)

    def _agree(
        self, control: Collectives, unit: Unit, here: Mapping[Part, Tensor]
    ) -> Mapping[Part, tuple[int, ...]]:
        """Return the ranks that hold each part which several hold.

        Ranks tell a digest of their parts, and the parts only where these digests are new, once for each.
        """
        mine = sorted(here)
        digests = control.all_gather_object(xxh3_64_hexdigest(repr(mine).encode()))
        known, holders = self._holders.get(unit, ((), {}))
        if [*digests] != [*known]:
            is_first = digests.index(digests[control.rank]) == control.rank
            told = control.all_gather_object(mine if is_first else None)
            ranks: dict[Part, list[int]] = defaultdict(list)
            for rank, digest in enumerate(digests):
                for part in told[digests.index(digest)]:
                    ranks[part].append(rank)
            holders = {part: tuple(several) for part, several in ranks.items() if len(several) > 1}
            self._holders[unit] = digests, holders
        return holders


def replicated_parts(unit: Unit) -> dict[Part, Tensor]:
    """Return the parts of the unit's state on this rank that other ranks may hold too, and must hold alike.

    Buffers, which may differ as batch norm's statistics do, are not among them.
    """
    leaves = {f"model/{name}": leaf for name, leaf in unit.hooks.model_state(unit).items()}
    for number, model in enumerate(unit.models):
        for name, _ in model.named_buffers(remove_duplicate=False):
            leaves.pop(f"model/{unit.qualify(number, name)}", None)
    for optimizer in unit.optimizers:
        state = unit.hooks.optimizer_state(unit, optimizer)
        leaves |= {f"optimizer/{name}": leaf for name, leaf in state.leaves.items()}
    return {
        (key, tuple(offset), tuple(tensor.shape)): tensor
        for key, leaf in leaves.items()
        if leaf.replicated
        for offset, tensor in leaf.shards
    }


def checksum(tensors: Sequence[Tensor]) -> str:
    """Return a text that differs if any byte of the tensors does. A device adds up its own."""
    found, elsewhere = list[int](), defaultdict[torch.device, list[Tensor]](list)
    for tensor in tensors:
        if tensor.is_cpu:
            found.append(_digest(tensor))
        elif tensor.numel():
            elsewhere[tensor.device].append(tensor)
    for each in elsewhere.values():
        found += torch.stack([*sums(each)]).tolist()
    return xxh3_64_hexdigest(repr(found).encode())


def _digest(tensor: Tensor) -> int:
    return xxh3_64_intdigest(_as_bytes(tensor.cpu()).numpy().data)


@torch.no_grad()
def sums(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield weighted sums of the tensors' words, and of their upper halves.

    Words are those of all tensors, end to end, on their device; each `_CHUNK` of them has two sums. Weights
    are odd, so one word that differs always shows in the first. The second shows what cancels there, the
    signs of many words above all.
    """
    weights: Tensor | None = None
    for data in _chunks(map(_as_bytes, tensors)):
        words = data.view(torch.int64)
        if weights is None:
            weights = _weights(len(words), data.device)
        yield (words * weights[: len(words)]).sum()
        yield ((words >> 32) * weights[: len(words)]).sum()


def _chunks(flat: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of flat tensors, end to end, `_CHUNK` words at a time; zeros follow the last one."""
    parts, room = list[Tensor](), 8 * _CHUNK
    for tensor in flat:
        start = 0
        while start < tensor.numel():
            parts.append(tensor[start : start + room])
            start, room = start + parts[-1].numel(), room - parts[-1].numel()
            if not room:
                yield torch.cat(parts)
                parts, room = [], 8 * _CHUNK
    if parts:
        yield torch.cat([*parts, parts[0].new_zeros(room % 8)])


def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, the same on all devices.

    Differences of small whole numbers, as counts and permutations have, cancel under weights with a pattern.
    """
    weights = torch.arange(1, count + 1, device=device)
    for factor, shift in _SCATTER:  # as splitmix64 makes its numbers
        weights *= factor
        weights ^= weights >> shift
    return weights.bitwise_or_(1)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, row-major, as uint8 (b,): a view if possible."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if data.stride() != (1,):  # torch calls a single element contiguous, and `view` refuses its stride
        data = data.as_strided(data.shape, (1,))
    return data.view(torch.uint8)


def _name_differences(control: Collectives, unit: Unit, here: Mapping[Part, Tensor]) -> None:
    """Compare each part by itself, and raise on all ranks. Collective."""
    held: dict[Part, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    told = control.all_gather_object({part: _digest(tensor) for part, tensor in here.items()})
    for rank, digests in enumerate(told):
        for part, digest in digests.items():
            held[part][digest].append(rank)
    problems = [
        f"  {key} {_box(offset, shape)}: "
        + " differ from ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in by_digest.values())
        for (key, offset, shape), by_digest in held.items()
        if len(by_digest) > 1
    ]
    if more := len(problems[_NAMED:]):
        problems[_NAMED:] = [f"  ... and {more} more"]
    if problems:
        listed = "\n".join(problems)
        raise AccelError(
            f"replicas: ranks hold different contents of what should be the same, in unit {unit.name!r}\n"
            f"{listed}\n"
            "start all ranks with one seed, reduce gradients wherever they are applied, and leave out what"
            " makes ranks compute differently; or go on from a checkpoint"
        )


def _box(offset: Sequence[int], shape: Sequence[int]) -> str:
    ends = (f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
    return f"[{', '.join(ends)}]"
