"""A place for each part of a model, found before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from attrs import define, field, frozen
from torch import nn

from accel_big_models.blocks import Block, blocks_of
from accel_big_models.converting import Convert, converted
from accel_big_models.plans import HOST, Place, Plan
from accel_big_models.sizes import available, bytes_in, bytes_of, text_of
from accel_core import ConfigError

__all__ = ["Classes", "Memory", "place_name", "plan", "plan_from_map"]

STREAMED: Final = 2
"""Blocks that are on a device at a time: the one that computes, and the next one."""

Memory = Mapping[str | int | torch.device, int | str]
"""Place -> bytes that it may hold, as a number or as text."""
Classes = Collection[str | type[nn.Module]]
"""Classes of modules, or their names."""


def plan(
    model: nn.Module,
    memory: Memory | None = None,
    *,
    whole: Classes | None = None,
    dtype: torch.dtype | None = None,
    convert: Convert | None = None,
) -> Plan:
    """Find a place for each block of a model, which may be on the meta device.

    Devices are filled one after the other in the order of `memory`, then "cpu", then "disk". If all of it
    does not fit on devices, the first device keeps room for two blocks, to compute the others. Blocks that
    share a weight are placed together.

    Args:
        model: only shapes and dtypes are read.
        memory: place -> bytes it may hold, or text such as "10GiB". Places are torch devices of any kind,
            numbers of the current accelerator's, "cpu" and "disk". None: what is free now on all
            accelerators and in the host's memory, then disk.
        whole: classes of modules that are never divided; see `blocks_of`.
        dtype: of floating-point weights once they are loaded; None: their own.
        convert: that of `load`, tried on the meta device: the plan counts what it makes of each block. Each
            place but the disk keeps room for the largest block before it is converted.

    Raises:
        ConfigError: parts fit nowhere; names them with their bytes. `convert` needs weights with values.
    """
    rooms = _rooms(memory)
    devices = [place for place in rooms if place not in HOST]
    blocks = blocks_of(model, whole)
    parts = _parts(blocks, dtype)
    if convert is not None:
        before = max((sum(part.tensors.values()) for part in parts), default=0)
        rooms = {place: room if place == "disk" else room - before for place, room in rooms.items()}
        parts = _parts(converted(model, blocks, convert, dtype), None)
    groups = _together(parts)
    found, kept = _fill(groups, rooms), 0
    if devices and any(place in HOST for place in found):
        largest = max(groups, key=lambda group: group.largest)
        kept, room = STREAMED * largest.largest, rooms[devices[0]]
        if kept > room:
            raise ConfigError(
                f"plan: the largest part, {largest.parts[0].name}, has {text_of(largest.largest)}; to compute"
                f" it on {devices[0]} takes {text_of(kept)}, and {text_of(room)} may be used\n"
                "allow more memory, or name smaller modules in whole="
            )
        found = _fill(groups, {**rooms, devices[0]: rooms[devices[0]] - kept})
    missing = [group for group, place in zip(groups, found, strict=True) if not place]
    if missing:
        _refuse(model, missing, rooms)
    places = [
        Place(part.name, place, part.size, group.reason(part, place, rooms))
        for group, place in zip(groups, found, strict=True)
        for part in group.parts
    ]
    order = {part.name: number for number, part in enumerate(parts)}
    return Plan(
        places=tuple(sorted(places, key=lambda place: order[place.name])),
        memory=rooms,
        device=torch.device(devices[0] if devices else "cpu"),
        kept=kept,
        dtype=dtype,
    )


def plan_from_map(
    model: nn.Module,
    device_map: Mapping[str, str | int | torch.device],
    *,
    whole: Classes | None = None,
    dtype: torch.dtype | None = None,
) -> Plan:
    """Make the plan that a device map asks for.

    The first device in the map computes what lies on "cpu" and "disk".

    Args:
        model: only shapes and dtypes are read.
        device_map: name of module or tensor, "" the model, -> place; the longest name that fits counts.
        whole: classes of modules that are never divided but by the map; see `blocks_of`.
        dtype: of floating-point weights once they are loaded; None: their own.

    Raises:
        ConfigError: a tensor has no place, or the model has no part of a name.
    """
    asked = {name: place_name(place) for name, place in device_map.items()}
    blocks = blocks_of(model, whole, asked)
    known = {name for name, _ in model.named_modules()}.union(*(block.tensors for block in blocks))
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(
            f"device_map: the {type(model).__name__} has no part {unknown[0]!r}\n"
            "use names of its modules, parameters and buffers"
        )
    parts = _parts(blocks, dtype)
    places = tuple(
        Place(part.name, _asked(asked, part.name, model), part.size, "device_map") for part in parts
    )
    devices = [place for place in asked.values() if place not in HOST]
    return Plan(places=places, device=torch.device(devices[0] if devices else "cpu"), dtype=dtype)


def place_name(place: str | int | torch.device) -> str:
    """Return a place as text: "cpu", "disk", or a torch device with its index.

    Raises:
        ConfigError: it is not a torch device.
    """
    if place == "disk":
        return "disk"
    try:
        if isinstance(place, int) or str(place).isdecimal():
            kind = torch.accelerator.current_accelerator()
            place = torch.device(kind.type if kind else "cuda", int(str(place)))
        device = torch.device(place)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"place {place!r} is not a torch device: {str(error).splitlines()[0]}\n"
            "name devices as 'cuda:0' or 'xpu:1', or write 'cpu' or 'disk'"
        ) from error
    return device.type if device.type in ("cpu", "meta") else f"{device.type}:{device.index or 0}"


@frozen
class _Part:
    """A block, or one tensor of a divided module.

    size: in bytes, without tensors that an earlier part has. tensors: identity -> bytes.
    """

    name: str
    size: int
    tensors: Mapping[int, int]


@define
class _Group:
    """Parts that share tensors; most groups have one part."""

    parts: list[_Part] = field(factory=list)

    @property
    def size(self) -> int:
        """Return the bytes of all parts, shared tensors once."""
        return sum(part.size for part in self.parts)

    @property
    def largest(self) -> int:
        """Return the bytes of the largest part, with what it shares."""
        return max(sum(part.tensors.values()) for part in self.parts)

    def reason(self, part: _Part, place: str, rooms: Mapping[str, float]) -> str:
        """Say why a part is in its place."""
        first = self.parts[0]
        if part is not first:
            return f"shares weights with {first.name}"
        earlier = [room for room in rooms if room != place][: list(rooms).index(place)]
        return f"no room left on {', '.join(earlier)}" if earlier else "fits"


def _rooms(memory: Memory | None) -> dict[str, float]:
    """Return place -> bytes: devices as given, then the host's memory, then disk."""
    rooms: dict[str, float] = {}
    if memory is None:
        kind = torch.accelerator.current_accelerator(check_available=True)
        devices = (
            []
            if kind is None
            else [torch.device(kind.type, n) for n in range(torch.get_device_module(kind).device_count())]
        )
        rooms = {str(device): available(device) for device in (*devices, torch.device("cpu"))}
        return {**rooms, "disk": math.inf}
    for place, size in memory.items():
        infinite = isinstance(size, float) and math.isinf(size)
        rooms[place_name(place)] = math.inf if infinite else bytes_in(size)
    ordered = sorted(rooms, key=lambda place: HOST.index(place) if place in HOST else -1)
    return {place: rooms[place] for place in ordered}


def _parts(blocks: Sequence[Block], dtype: torch.dtype | None) -> list[_Part]:
    """Return blocks as parts; of a divided module each tensor of its own is one."""
    owners: dict[int, str] = {}
    parts = []
    for block in blocks:
        pieces = {block.name: block.tensors}
        if block.divided:
            pieces = {name: {name: tensor} for name, tensor in block.tensors.items()}
        for name, tensors in pieces.items():
            sizes = {id(tensor): bytes_of(tensor, dtype) for tensor in tensors.values()}
            own = sum(size for key, size in sizes.items() if owners.setdefault(key, name) == name)
            parts.append(_Part(name, own, sizes))
    return parts


def _together(parts: Sequence[_Part]) -> list[_Group]:
    """Group parts that share tensors, in the order of their first parts."""
    homes: dict[int, _Group] = {}
    groups: list[_Group] = []
    for part in parts:
        touched = list({id(homes[key]): homes[key] for key in part.tensors if key in homes}.values())
        group = touched[0] if touched else _Group()
        if not touched:
            groups.append(group)
        for other in touched[1:]:
            group.parts.extend(other.parts)
            groups.remove(other)
        group.parts.append(part)
        homes.update((key, group) for member in group.parts for key in member.tensors)
    return groups


def _fill(groups: Sequence[_Group], rooms: Mapping[str, float]) -> list[str]:
    """Return the place of each group, "" for one that fits nowhere.

    A place that was full stays closed.
    """
    left, places = dict(rooms), list(rooms)
    chosen = []
    for group in groups:
        fitting = next((place for place in places if group.size <= left[place]), "")
        chosen.append(fitting)
        if fitting:
            left[fitting] -= group.size
            places = places[places.index(fitting) :]
    return chosen


def _refuse(model: nn.Module, missing: Sequence[_Group], rooms: Mapping[str, float]) -> None:
    named = [f"{group.parts[0].name or '(all of it)'} ({text_of(group.size)})" for group in missing]
    total = text_of(sum(group.size for group in missing))
    allowed = ", ".join(f"{place} {text_of(room)}" for place, room in rooms.items())
    shown = ", ".join(named[:8]) + (f" and {len(named) - 8} more" if len(named) > 8 else "")
    raise ConfigError(
        f"plan: {total} of the {type(model).__name__} fit nowhere: {shown}; memory may be used so:"
        f" {allowed}\n"
        "allow more memory, or add 'disk' to memory="
    )


def _asked(places: Mapping[str, str], name: str, model: nn.Module) -> str:
    at = name
    while at not in places:
        if not at:
            raise ConfigError(
                f"device_map: {name} of the {type(model).__name__} has no place\n"
                "add an entry for it, or one for the whole model, ''"
            )
        at = at.rpartition(".")[0]
    return places[at]
