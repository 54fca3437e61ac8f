"""Compare the contents of replicas at every save, by checksums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from attrs import define, field
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from accel_core.checkpoint.agree import gather_from_all_ranks
from accel_core.checkpoint.plan import Box, Declared, Group, Key, raise_problems
from accel_core.checkpoint.staging import pieces
from accel_core.distributed.tensor_bytes import as_bytes, bytes_of, copyable

if TYPE_CHECKING:
    from accel_core.contract.state import Leaf
    from accel_core.contract.world import Collectives

SMALL_BYTES: Final = 1 << 16
"""Size up to which tensors are copied together before their checksum is taken.

A checksum of each would take longer.
"""
_CHUNK: Final = 1 << 22
"""Words of 8 bytes that a device adds up at a time."""
_SCATTER: Final = ((-0x61C8864680B583EB, 30), (-0x40A7B892E31B1A47, 27), (-0x6B2FB644ECCEEE15, 31))
"""(factor, bits to shift) of each round that scatters whole numbers over 64 bits."""


class _Room(NamedTuple):
    """Memory for small tensors, and a view of it for each, by the tensors' numbers."""

    numbers: list[int]
    memory: Tensor
    views: list[Tensor]


@define(eq=False)
class Replicas:
    """The parts of this rank's leaves that other ranks hold too.

    Leaves of which only one rank's is kept, as batch norm's statistics, are not among them.
    """

    _parts: Mapping[str, list[tuple[Key, int]]]
    """Digest of some ranks -> (leaf, number of its shard) of each part they all hold."""
    _together: dict[tuple[str, torch.device], _Room] = field(factory=dict, init=False)
    """(such a digest, device) -> memory for the small ones there in the last save."""

    @classmethod
    def of(cls, groups: Sequence[Group], rank: int) -> Replicas:
        """Return the replicas of a rank.

        Parts of one digest are the same on all, in the same order.
        """
        found: list[tuple[Key, Box, str, int]] = []
        for group in groups:
            here = dict(group.held).get(rank)
            if here is None or not here.spread:
                continue
            for number, box in enumerate(here.boxes):
                ranks = [*dict.fromkeys(group.holders.get(box, ()))]
                if len(ranks) > 1 and here.boxes.index(box) == number:
                    digest = xxh3_64_hexdigest(repr(ranks).encode())
                    found += [(key, box, digest, number) for key in group.keys]
        parts: dict[str, list[tuple[Key, int]]] = defaultdict(list)
        for key, _, digest, number in sorted(found, key=itemgetter(0, 1)):
            parts[digest].append((key, number))
        return cls(dict(parts))

    def compare(
        self, control: Collectives, leaves: Mapping[Key, Leaf], declared: Mapping[Key, Declared]
    ) -> None:
        """Compare the contents of these parts. Collective.

        Raises:
            CheckpointError: the ranks that hold a box have different contents; names leaf and ranks.
        """
        found: dict[str, set[str]] = defaultdict(set)
        for told in gather_from_all_ranks(
            control, "save_state: compare replicas", lambda: self._checksums(leaves)
        ):
            for held, checksum in told.items():
                found[held].add(checksum)
        if any(len(checksums) > 1 for checksums in found.values()):
            _name_differences(control, leaves, declared)

    def _checksums(self, leaves: Mapping[Key, Leaf]) -> dict[str, str]:
        return {
            held: self._checksum(held, [leaves[key].shards[number][1] for key, number in parts])
            for held, parts in self._parts.items()
        }

    def _checksum(self, held: str, tensors: Sequence[Tensor]) -> str:
        tensors = copyable(tensors)
        small: dict[torch.device, list[int]] = defaultdict(list)
        data = [tensor for tensor in tensors if tensor.nbytes > SMALL_BYTES]
        for number, tensor in enumerate(tensors):
            if tensor.nbytes <= SMALL_BYTES:
                small[tensor.device].append(number)
        for device, numbers in small.items():
            each = [tensors[number] for number in numbers]
            room = self._together.get((held, device))
            if room is None or room.numbers != numbers:  # some may have moved
                room = self._together[held, device] = _Room(numbers, *_room_for(each, device))
            with torch.no_grad():
                torch._foreach_copy_(room.views, each)
            data.append(room.memory)
        return xxh3_64_hexdigest(repr(checksums(data)).encode())


def _room_for(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """One piece of memory, and in it a view for each tensor, aligned to any item."""
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors]
    with torch.inference_mode(False):  # later saves write into it, in whatever mode
        buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        pieces = zip(buffer.split(sizes), tensors, strict=True)
        views = [piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for piece, tensor in pieces]
    return buffer, views


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Numbers of which some differ if any byte of the tensors does.

    Read from each device once.
    """
    here, count = [tensor for tensor in tensors if tensor.is_cpu], torch.get_num_threads()
    found = [0] * len(here)
    with ThreadPoolExecutor(count) as threads:  # each takes its share at once: a task of its own costs more
        parts = threads.map(_digests, [here[first::count] for first in range(count)])
        for first, part in enumerate(parts):
            found[first::count] = part
    elsewhere: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        if not tensor.is_cpu and tensor.numel():
            elsewhere[tensor.device].append(tensor)
    for each in elsewhere.values():
        found += torch.stack([*sums(each)]).tolist()
    return found


def _digests(tensors: Sequence[Tensor]) -> list[int]:
    return [xxh3_64_intdigest(bytes_of(tensor)) for tensor in tensors]


@torch.no_grad()
def sums(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield weighted sums of the tensors' words, and of their upper halves.

    Words are those of all tensors, end to end, on their device; each `_CHUNK` of them has two sums. Weights
    are odd, so one word that differs always shows in the first. The second shows what cancels there, the
    signs of many words above all.
    """
    weights: Tensor | None = None
    for parts in pieces(map(as_bytes, tensors), 8 * _CHUNK):
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        if missing := -data.numel() % 8:
            data = torch.nn.functional.pad(data, (0, missing))
        elif data.storage_offset() % 8:
            data = data.clone()
        words = data.view(torch.int64)
        if weights is None:
            weights = _weights(len(words), data.device)
        yield (words * weights[: len(words)]).sum()
        yield ((words >> 32) * weights[: len(words)]).sum()


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, the same on all devices.

    Differences of small whole numbers, as counts and permutations have, cancel under weights with a pattern.
    """
    weights = torch.arange(1, count + 1, device=device)
    for factor, shift in _SCATTER:  # as splitmix64 makes its numbers
        weights *= factor
        weights ^= weights >> shift
    return weights.bitwise_or_(1)


def _name_differences(
    control: Collectives, leaves: Mapping[Key, Leaf], declared: Mapping[Key, Declared]
) -> None:
    """Compare each part by itself, and raise. Collective.

    Raises:
        CheckpointError: the ranks that hold a box have different contents; names leaf and ranks.
    """

    def digests() -> dict[tuple[Key, Box], int]:
        return {
            (key, box): xxh3_64_intdigest(bytes_of(tensor))
            for key, leaf in leaves.items()
            if declared[key].spread
            for box, (_, tensor) in zip(declared[key].boxes, leaf.shards, strict=True)
        }

    held: dict[tuple[Key, Box], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, told in enumerate(gather_from_all_ranks(control, "save_state: compare replicas", digests)):
        for part, digest in told.items():
            held[part][digest].append(rank)
    problems = [
        f"{key[0]}: {key[1]} {box}: "
        + " differ from ".join(f"rank(s) {', '.join(map(str, ranks))}" for ranks in by_digest.values())
        for (key, box), by_digest in held.items()
        if len(by_digest) > 1
    ]
    raise_problems(
        problems,
        "ranks hold different contents of what should be the same on all",
        "ranks must be equal here: start them with one seed, average what drifts apart, then save",
    )
