"""Compare two checkpoints: tensors by blocks, everything else by values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field, frozen

from accel_checkpoint_tools.measure import Difference, Tolerance, measure
from accel_checkpoint_tools.sections import SECTIONS, SETTINGS, sections_of, ties_of
from accel_checkpoint_tools.text import in_order
from accel_core import Checkpoint, CheckpointError, Stored

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ABSENT", "Comparison", "TensorPair", "ValuePair", "compare"]

Key = tuple[str, str]
"""A unit ("" is the run itself), and `model/NAME`, `optimizer/NAME/KEY` or alike."""

ABSENT: Final = object()
"""In place of a value, on a side without it; like no value."""


@frozen
class TensorPair:
    """A tensor of both checkpoints, or of one of them.

    difference: None if all elements are equal, or cannot be compared.
    """

    key: Key
    a: Stored | None
    b: Stored | None
    difference: Difference | None = None

    @property
    def section(self) -> str:
        """The section it belongs to: the first word of its key."""
        return _section(self.key)

    @property
    def name(self) -> str:
        """Its name after the section."""
        return self.key[1].partition("/")[2]

    @property
    def problem(self) -> str:
        """The reason why both are unequal by their description, or ""."""
        if self.a is None or self.b is None:
            return f"only in {'A' if self.b is None else 'B'}"
        if self.a.shape != self.b.shape:
            return f"shape {list(self.a.shape)} in A, {list(self.b.shape)} in B"
        if self.a.dtype != self.b.dtype:
            return f"{self.a.dtype} in A, {self.b.dtype} in B"
        return f"layout {self.a.layout} in A, {self.b.layout} in B" if self.a.layout != self.b.layout else ""

    @property
    def differs(self) -> bool:
        """True if it is not the same on both sides."""
        return bool(self.problem) or self.difference is not None


@frozen
class ValuePair:
    """A value that differs, as JSON; ABSENT on a side without it."""

    section: str
    path: str
    a: Any
    b: Any
    difference: Difference | None = None
    """Of tensors in the state."""


@define
class Comparison:
    """Tensors of A and B that were compared, equal ones too, and unequal values.

    sections: all that were compared. decisive: those in which a difference counts.
    """

    a: str
    b: str
    sections: Sequence[str]
    decisive: Collection[str]
    tensors: list[TensorPair] = field(factory=list)
    values: list[ValuePair] = field(factory=list)

    @property
    def differs(self) -> bool:
        """True if a tensor differs, or a value in a decisive section."""
        values = any(value.section in self.decisive for value in self.values)
        return values or any(pair.differs for pair in self.tensors)


def compare(
    a: Checkpoint, b: Checkpoint, *, only: Collection[str] = (), tolerance: Tolerance | None = None
) -> Comparison:
    """Compare two opened checkpoints of any stacks, in these or all sections.

    Every tensor and all state of both belongs to a section; see `SECTIONS`.

    Raises:
        CheckpointError: files of a node are not here, are damaged, or cannot be read; or neither checkpoint
            has anything in the sections that were asked for.
    """
    for each in (a, b):
        if each.absent:
            raise each.lacks("a part of the state")
    ties = ties_of(a), ties_of(b)
    states = sections_of(a), sections_of(b)
    for state, tied in zip(states, ties, strict=True):
        state["model"][""]["ties"] = tied
    chosen = _chosen(a, b, states, only)
    comparer = _Comparer(a, b, tolerance or Tolerance())
    decisive = only or [section for section in chosen if section not in SETTINGS]
    found = Comparison(str(a.place), str(b.place), chosen, decisive)
    for pair in _pairs(a.tensors, b.tensors, *ties, chosen):
        comparable = pair.a and pair.b and pair.a.shape == pair.b.shape
        difference = measure(pair.a, pair.b, comparer.tolerance) if comparable and pair.a and pair.b else None
        found.tensors.append(TensorPair(pair.key, pair.a, pair.b, difference))
    for section in chosen:
        one, other = (each.get(section, {}) for each in states)
        found.values += [ValuePair(section, *each) for each in comparer.values("", one, other)]
    return found


def _chosen(
    a: Checkpoint, b: Checkpoint, states: Sequence[Mapping[str, Any]], only: Collection[str]
) -> list[str]:
    """Return the sections to compare: these, or all that a checkpoint has."""
    of_tensors = {_section(key) for each in (a, b) for key in each.tensors if key[0]}
    filled = of_tensors | {name for each in states for name, state in each.items() if not _is_empty(state)}
    known = [*SECTIONS, *sorted((of_tensors | states[0].keys() | states[1].keys()) - SECTIONS.keys())]
    if unknown := [name for name in only if name not in known]:
        raise CheckpointError(f"there is no section {unknown[0]!r:.200}\nchoose among {', '.join(known)}")
    if only and filled.isdisjoint(only):
        there = [name for name in known if name in filled]
        raise CheckpointError(
            f"there is nothing to compare in {', '.join(only)}: neither {a.place} nor {b.place} has any\n"
            f"compare another section; they have {', '.join(there)}"
        )
    return [name for name in known if not only or name in only]


def _section(key: Key) -> str:
    return key[1].partition("/")[0]


def _is_empty(state: Any) -> bool:
    """Return True for state in which there is nothing: no value but zeros, None and empty containers."""
    if isinstance(state, (dict, list)):
        return all(map(_is_empty, state.values() if isinstance(state, dict) else state))
    return not state


def _pairs(
    a: Mapping[Key, Stored],
    b: Mapping[Key, Stored],
    ties_a: Mapping[str, list[list[str]]],
    ties_b: Mapping[str, list[list[str]]],
    chosen: Collection[str],
) -> Iterator[TensorPair]:
    """Yield the tensors of one name, once each; a tied weight has all of its names."""
    seen: set[tuple[Key | None, Key | None]] = set()
    for key in sorted({*a, *b}, key=lambda key: in_order("/".join(key))):
        if not key[0] or _section(key) not in chosen:
            continue  # those of the run itself are compared where its state names them
        place = _stored_as(key, a, ties_a), _stored_as(key, b, ties_b)
        if place not in seen:
            seen.add(place)
            yield TensorPair(key, a[place[0]] if place[0] else None, b[place[1]] if place[1] else None)


def _stored_as(key: Key, tensors: Mapping[Key, Stored], ties: Mapping[str, list[list[str]]]) -> Key | None:
    """Return the key under which a checkpoint has this tensor, as itself or by a tie."""
    if key in tensors:
        return key
    sort, _, rest = key[1].partition("/")
    name, slash, part = rest.rpartition("/") if sort == "optimizer" else (rest, "", "")
    for group in ties.get(key[0], ()) if name else ():
        for other in group if name in group else ():
            if (found := (key[0], f"{sort}/{other}{slash}{part}")) in tensors:
                return found
    return None


_Values = Iterator[tuple[str, Any, Any, Difference | None]]


@frozen
class _Comparer:
    """Both checkpoints, and how close is equal."""

    a: Checkpoint
    b: Checkpoint
    tolerance: Tolerance

    def values(self, path: str, a: Any, b: Any) -> _Values:
        """Yield (path, a, b, difference) of all leaves that differ."""
        one, other = _tensor(a, self.a), _tensor(b, self.b)
        if one is not None and other is not None:
            is_alike = _description(one) == _description(other)
            difference = measure(one, other, self.tolerance) if is_alike else None
            if difference or not is_alike:
                yield path, a, b, difference
        elif isinstance(a, dict) and isinstance(b, dict) and not (_is_tagged(a) or _is_tagged(b)):
            for key in dict.fromkeys([*a, *b]):
                under = f"{path}.{key}" if path else key
                yield from self.values(under, a.get(key, ABSENT), b.get(key, ABSENT))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for number, (left, right) in enumerate(zip(a, b, strict=True)):
                yield from self.values(f"{path}[{number}]", left, right)
        elif _is_tagged(a) and _is_tagged(b) and [*a] == [*b] and isinstance(next(iter(a.values())), list):
            yield from self.values(path, *(next(iter(each.values())) for each in (a, b)))
        elif a != b or isinstance(a, bool) != isinstance(b, bool):  # to Python, True is 1
            yield path, a, b, None


def _description(tensor: Stored | Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _is_tagged(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and next(iter(value)).startswith("$")


def _tensor(value: Any, of: Checkpoint) -> Stored | Tensor | None:
    """Return the tensor that this value of tagged JSON is, if it is one."""
    if not _is_tagged(value):
        return None
    ((tag, body),) = value.items()
    if tag == "$stored":
        return of.tensors["", body]
    tensor: Tensor | None = of.decode(value, "state") if tag == "$tensor" else None
    return tensor
