"""The device mesh: dimensions that plugins declare, arranged by arithmetic.

The mesh also determines the data that each rank reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

from attrs import Factory, evolve, field, frozen

from accel_core.contract.world import Topology
from accel_core.errors import ConfigError

Splits = Literal["samples", "tokens", "model"]
ALIKE: Final = frozenset({"tp"})
"""Reserved dimensions whose ranks compute the same activations.

Inside a layer that they split, each rank computes a part.
"""

RESERVED: Final[Mapping[str, tuple[int, Splits]]] = {
    "pp": (100, "model"),
    "dp_replicate": (200, "samples"),
    "dp_shard": (300, "samples"),
    "ep": (310, "samples"),
    "cp": (400, "tokens"),
    "sp": (410, "tokens"),
    "tp": (500, "model"),
}
"""Name of a dimension -> its position and its split."""


@frozen
class MeshDim:
    """One dimension of a device mesh.

    Reserved names have a position and a split: pp 100 model, dp_replicate 200 samples, dp_shard 300 samples,
    ep 310 samples, cp 400 tokens, sp 410 tokens, tp 500 model (same activations). Any other name must give
    both.

    Attributes:
        size: number of ranks along it; -1 takes the ranks that the other dimensions leave.
        position: orders dimensions, outermost (slowest varying rank) first.
        splits: the difference between ranks along it. `samples`: they read different samples. `tokens`: they
            read the same samples, and each rank has a part of the tokens and of the loss. `model`: they read
            the same samples and have the same loss.
        same_activations: ranks along it hold the same activations between layers, and so must draw the same
            random numbers for them (dropout); along all other dimensions ranks draw different numbers.
        within: name of the dimension whose ranks this one divides further. It is then not a factor of the
            world, because the other's size counts both; in a mesh, the other has the quotient of the sizes.
    """

    name: str
    size: int
    position: int = field(default=Factory(lambda self: self._reserved()[0], takes_self=True))
    splits: Splits = field(default=Factory(lambda self: self._reserved()[1], takes_self=True))

    same_activations: bool = field(default=Factory(lambda self: self.name in ALIKE, takes_self=True))
    within: str = ""

    def __attrs_post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("world", "control", "alone"):
            raise ConfigError(f"a mesh dimension cannot be called {self.name!r}\ngive it another name")
        if self.name in RESERVED and RESERVED[self.name] != (self.position, self.splits):
            raise ConfigError(
                f"mesh dimension {self.name!r} is at {self.position} and splits {self.splits}, but this name"
                f" is reserved for {RESERVED[self.name]}\nleave both out, or give it another name"
            )
        if self.size < 1 and self.size != -1:
            raise ConfigError(
                f"mesh dimension {self.name!r} has size {self.size}\ngive it 1 or more, or -1 for the rest"
            )

    def _reserved(self) -> tuple[int, Splits]:
        if self.name not in RESERVED:
            raise ConfigError(
                f"mesh dimension {self.name!r} lacks `position` or `splits`, which only"
                f" {', '.join(RESERVED)} may leave out\ngive both: MeshDim(name, size, position, splits)"
            )
        return RESERVED[self.name]


def arrange(dims: Iterable[MeshDim], ranks: int) -> tuple[MeshDim, ...]:
    """Return the dimensions outermost first, with sizes that are known and whose product is `ranks`.

    Equal dimensions count once. If no dimension splits samples or has size -1, the remaining ranks form
    `dp_replicate`: ranks that no dimension describes read different data, as they do without a mesh.

    Raises:
        ConfigError: the product is not `ranks`, two dimensions share a name or position or both split tokens,
            or a size does not divide the dimension that it lies within; shows every factor.
    """
    order = sorted(dict.fromkeys(dims), key=lambda dim: dim.position)
    for one, other in pairwise(order):
        if one.name == other.name or one.position == other.position:
            raise ConfigError(
                f"two mesh dimensions cannot be told apart: {one} and {other}\n"
                "give them one size, or configure only one of them"
            )
    if ranks > 1 and order and not any(dim.size == -1 or dim.splits == "samples" for dim in order):
        return arrange([*order, MeshDim("dp_replicate", -1)], ranks)
    sequences = [f"{dim.name} {dim.size}" for dim in order if dim.splits == "tokens" and dim.size != 1]
    if len(sequences) > 1:
        raise ConfigError(f"{' and '.join(sequences)} would both split sequences\ngive one of them")
    factors = [dim for dim in order if not dim.within]
    fixed = math.prod(dim.size for dim in factors if dim.size != -1)
    open_dims = [dim for dim in factors if dim.size == -1]
    if len(open_dims) > 1 or ranks % fixed or (order and not open_dims and fixed != ranks):
        raise _refusal(factors, fixed, ranks, [dim for dim in order if dim.within and dim.size > 1])
    sizes = {dim.name: ranks // fixed if dim.size == -1 else dim.size for dim in factors}
    for dim in order:
        if dim.within:
            whole = sizes.get(dim.within, 1)
            sizes[dim.name] = size = whole if dim.size == -1 else dim.size
            if whole % size:
                raise ConfigError(
                    f"{dim.name} {size} does not divide the {whole} rank(s) of {dim.within}; it is not a"
                    f" factor of the world\nset {dim.within} to a multiple of {size}, such as"
                    f" {dim.within}: {whole * size}, {dim.name}: {size}"
                )
            sizes[dim.within] = whole // size
    return tuple(evolve(dim, size=sizes[dim.name]) for dim in order)


def _refusal(order: Sequence[MeshDim], fixed: int, ranks: int, inner: Sequence[MeshDim] = ()) -> ConfigError:
    factors = " × ".join(f"{dim.name} {'-1' if dim.size == -1 else dim.size}" for dim in order)
    if sum(dim.size == -1 for dim in order) > 1:
        return ConfigError(
            f"the mesh {factors} leaves the rest of world {ranks} to two dimensions\n"
            "give all sizes but one, or only one of them -1"
        )
    for dim in inner:
        whole = next((it.size for it in order if it.name == dim.within), 1)
        if fixed * dim.size == ranks and whole != -1:
            return ConfigError(
                f"the mesh {factors} = {fixed}, world {ranks}: {dim.name} {dim.size} is not a factor, it"
                f" divides {dim.within}\nset {dim.within}: {whole * dim.size}, {dim.name}: {dim.size}"
            )
    return ConfigError(
        f"the mesh {factors} = {fixed}{' × the rest' if '-1' in factors else ''}, world {ranks}\n"
        f"make the product {ranks} (a size of -1 takes the rest), or start {fixed} processes"
        f"{' or a multiple' if '-1' in factors else ''}"
    )


@frozen(eq=False)
class Mesh:
    """The ranks of a run as a grid, as this rank sees it.

    Attributes:
        dims: the dimensions, as `arrange` returns them.
        rank: this rank.
        device_mesh: torch's DeviceMesh with dimensions of these names, or another object that the stack's
            `build_mesh` works with.
    """

    dims: tuple[MeshDim, ...]
    rank: int
    device_mesh: Any

    def size(self, *names: str) -> int:
        """Return the number of ranks along these dimensions together.

        A dimension that the mesh does not have counts as 1.
        """
        return math.prod(dim.size for dim in self.dims if dim.name in names)

    def total(self, name: str) -> int:
        """Return the size of a dimension as it is configured: with the dimensions that lie within it."""
        return self.size(name, *(dim.name for dim in self.dims if dim.within == name))

    def group(self, *names: str) -> Sequence[int]:
        """Return this rank and the ranks that differ from it along these dimensions only."""
        ranks, stride = [self.rank], 1
        for dim in reversed(self.dims):
            if dim.name in names:
                first = self.index(dim.name) * stride
                ranks = [rank - first + at * stride for at in range(dim.size) for rank in ranks]
            stride *= dim.size
        return ranks

    def index(self, *names: str) -> int:
        """Return this rank's number along these dimensions, the outermost slowest."""
        rest, index, stride = self.rank, 0, 1
        for dim in reversed(self.dims):
            rest, at = divmod(rest, dim.size)
            if dim.name in names:
                index, stride = index + at * stride, stride * dim.size
        return index

    def names(self, *splits: Splits) -> tuple[str, ...]:
        """Return the names of the dimensions that split any of `splits` (default: all), outermost first."""
        return tuple(dim.name for dim in self.dims if not splits or dim.splits in splits)

    def stream(self) -> int | None:
        """Return the number of this rank's forward stream; ranks of `same_activations` share one.

        None if only samples are split: then the process's own random streams are used.
        """
        if all(dim.splits == "samples" or dim.size == 1 for dim in self.dims):
            return None
        return self.index(*(dim.name for dim in self.dims if not dim.same_activations))

    def topology(self) -> Topology:
        """Return the topology: ranks along `tokens` and `model` dimensions read the same data."""
        samples, parts = self.names("samples"), self.names("samples", "tokens")
        return Topology(
            reader=self.index(*samples),
            readers=self.size(*samples),
            losses=self.size(*parts),
            loss_dim=self._joined(parts),
            gather_dim=self._joined(samples),
        )

    def _joined(self, names: Sequence[str]) -> str:
        """Return the name of the collectives along these dimensions."""
        real = [dim.name for dim in self.dims if dim.size > 1]
        along = [name for name in real if name in names]
        return "world" if along == real else "+".join(along) or "alone"
