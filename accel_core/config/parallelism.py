"""Section `parallelism`: the number of ranks along each dimension of the installed plugins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.errors import ConfigError
from accel_core.plugins.catalog import catalog_entries, install_hint
from accel_core.plugins.discovery import BLOCK_VARIABLE, discover

if TYPE_CHECKING:
    from accel_core.plugins.discovery import Discovery, Record

SECTION: Final = "parallelism"
_GENERAL: Final = frozenset({"parallel", "parallelism", "model", "size", "degree"})
"""Words of other libraries' names for a size that tell no dimension, as in `tensor_model_parallel_size`."""


class ParallelismConfig(Mapping[str, int]):
    """Number of ranks along each dimension of parallelism. Section `parallelism`.

    The installed plugins say which dimensions there are, such as `dp_replicate`, `dp_shard`, `tp`, `pp`,
    `cp`, `ep` and `sp`. A dimension that is left out has size 1. `ParallelismConfig(tp=2).tp_size` is 2.

    Args:
        sizes: DIMENSION=SIZE or DIMENSION_size=SIZE. One size may be -1: the ranks that the others leave.

    Raises:
        ConfigError: no installed plugin has the dimension, the size is not 1 or more or -1, or two are -1.
    """

    def __init__(self, **sizes: int) -> None:
        self._sizes: dict[str, int] = {}
        for word, size in sizes.items():
            name = word.removesuffix("_size")
            if problem := unknown_dimension(name, discover()) or wrong_size(size):
                raise ConfigError(f"ParallelismConfig({word}={size!r}): {problem}\ncorrect this argument")
            if self._sizes.setdefault(name, int(size)) != size:
                raise ConfigError(f"ParallelismConfig({name}=..., {name}_size=...) differ\ngive one of them")
        if problem := two_open(self._sizes):
            raise ConfigError(f"ParallelismConfig: {problem}\ngive all sizes but one, or leave one out")

    def __getitem__(self, name: str) -> int:
        return self._sizes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __repr__(self) -> str:
        return f"ParallelismConfig({', '.join(f'{name}={size}' for name, size in self.items())})"

    def __getattr__(self, name: str) -> int:
        dimension = name.removesuffix("_size")
        if name.endswith("_size") and name != "_size" and dimension in dimensions(discover()):
            return self._sizes.get(dimension, 1)
        raise AttributeError(f"ParallelismConfig has no attribute {name!r}", name=name, obj=self)

    def __reduce__(self) -> tuple[object, tuple[dict[str, int]]]:
        return _restored, (self._sizes,)


def _restored(sizes: dict[str, int]) -> ParallelismConfig:
    return ParallelismConfig(**sizes)


def dimensions(discovery: Discovery) -> dict[str, list[Record]]:
    """Return dimension -> the installed plugins that divide ranks along it, strategies first."""
    found: dict[str, list[Record]] = {}
    for slot in ("strategy", "extension"):
        for record in discovery.of(slot):
            for name in record.card.dimensions if record.card else ():
                found.setdefault(name, []).append(record)
    return found


def about(name: str, record: Record) -> str:
    """Return the sentence of a plugin's card about a dimension."""
    return record.card.dimensions[name] if record.card else ""


def unknown_dimension(name: str, discovery: Discovery) -> str:
    """Return the error text for a dimension that no installed plugin has; empty for other names."""
    known = dimensions(discovery)
    if name in known:
        return ""
    entry = next((entry for entry in catalog_entries() if name in entry.dimensions), None)
    if entry is not None:
        package = f"the {entry.slot} {entry.name} has it; {install_hint(entry.folder)}"
        if entry.name in discovery.blocked:
            package = f"the {entry.slot} {entry.name} has it, and {BLOCK_VARIABLE} blocks it"
        return f"no installed plugin has the dimension {name!r}\n{package}"
    has = f"the installed plugins have {', '.join(sorted(known))}" if known else "no installed plugin has any"
    is_foreign = _GENERAL.intersection(re.findall(r"[a-z]+", name.lower()))  # else misspelt
    hint = "" if is_foreign else did_you_mean(name, known)
    hint = hint or nearest(name, discovery) or did_you_mean(name, known)
    return f"no plugin has the dimension {quoted(name)}{hint}\n{has}"


def nearest(key: str, discovery: Discovery) -> str:
    """Return a hint at the dimensions that an unknown key may mean; empty if no word of it tells one.

    The words of a key, such as `tensor_parallel_degree`, are compared with the names of dimensions and with
    what the sentences of cards begin with ("Tensor parallelism: ...").
    """
    words = set(re.findall(r"[a-z]+", key.lower())) - _GENERAL
    scores: dict[str, int] = {}
    for name, records in dimensions(discovery).items():
        titles = [about(name, record).partition(":")[0] for record in records]
        known = {name, *name.split("_"), *re.findall(r"[a-z]+", " ".join(titles).lower())}
        scores[name] = len(words & known) + 2 * (key.lower().startswith(f"{name}_"))
    best = max(scores.values(), default=0)
    meant = [f"{SECTION}.{name}" for name, score in scores.items() if score == best]
    return f"; did you mean {' or '.join(meant)}?" if best else ""


def wrong_size(size: Any) -> str:
    """Return the error text for a size that no dimension can have; empty for other sizes."""
    is_whole = isinstance(size, Integral) and not isinstance(size, bool)
    if is_whole and (int(size) >= 1 or int(size) == -1):
        return ""
    return (
        f"a size is a whole number, 1 or more, or -1 for the ranks that the others leave, got {quoted(size)}"
    )


def two_open(sizes: Mapping[str, int]) -> str:
    """Return the error text if two sizes are -1; else empty."""
    names = [name for name, size in sizes.items() if size == -1]
    return f"{' and '.join(names)} are both -1; only one may take the rest" if len(names) > 1 else ""
