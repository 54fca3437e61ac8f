"""A model's whole weights by its own names: a stream, a dict, or files."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from accel_core.checkpoint.extra import exported
from accel_core.checkpoint.weight_files import Names, write_weights
from accel_core.contract.arguments import did_you_mean
from accel_core.contract.state import leaf_of
from accel_core.distributed.nested import send_to_device
from accel_core.distributed.together import agree_on_call, run_on_all_ranks
from accel_core.errors import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_core.contract.run import Run
    from accel_core.contract.unit import Unit


def weights_of(
    run: Run, model: nn.Module, dtype: torch.dtype | None = None, to: torch.device | None = None
) -> Iterator[tuple[Names, Tensor]]:
    """Yield (names, whole tensor) of each parameter and persistent buffer of the model. Collective.

    Names are canonical, without the model's number that a unit of several models puts before them. A model
    that was not prepared is read as it is.
    """
    unit, number = _home(run, model)
    yield from _weights(unit, number, exported(unit, number)[0], dtype, to)


def _weights(
    unit: Unit,
    number: int,
    names: Mapping[str, Names],
    dtype: torch.dtype | None = None,
    to: torch.device | None = None,
) -> Iterator[tuple[Names, Tensor]]:
    """Yield (keys, whole weight) of the model `number`, with `names` from `exported`."""
    prefix = unit.names.qualify(number, "")
    for canonical, tensor in unit.hooks.iter_weights(unit, dtype, to):
        # Names may be unknown on this rank: parts of the model that only other ranks have.
        own = [canonical.removeprefix(prefix)] if canonical.startswith(prefix) else []
        if keys := names.get(canonical, own):
            yield keys, tensor


def full_parameters(
    run: Run, model: nn.Module, names: Iterable[str] | None, *, writeback: bool
) -> AbstractContextManager[Any]:
    """Make the model's parameters of these names whole in a context. Collective."""
    unit, number = _home(run, model)
    module = unit.models[number]
    prefix, all_names = unit.names.qualify(number, ""), module.named_parameters(remove_duplicate=False)
    known = [unit.names.qualify(number, name).removeprefix(prefix) for name, _ in all_names]
    wanted = known if names is None else list(names)
    if unknown := sorted({*wanted}.difference(known)):
        raise AccelError(
            f"full_parameters: the {type(module).__name__} has no parameter {unknown[0]!r}"
            f"{did_you_mean(unknown[0], known)}"
            "\nuse the names that named_parameters() of your own model gives"
        )
    canonical = [prefix + name for name in wanted]
    once = list(dict.fromkeys(unit.names.aliases.get(name, name) for name in canonical))
    context: AbstractContextManager[Any] = unit.hooks.full_parameters(unit, once, writeback)
    return context


class _OnRank0(OrderedDict[str, Any]):
    """Empty state dict of ranks other than rank 0; its errors say that rank 0 has the weights."""

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(f"{key}: {self!r}")

    def __repr__(self) -> str:
        return "{} (rank 0 has the weights; get_state_dict(model, rank0_only=False) gives them to every rank)"


def state_dict(run: Run, model: nn.Module, *, rank0_only: bool) -> dict[str, Any]:
    """Return the model's state dict as if whole and unwrapped. Collective.

    If ranks hold parts of the weights, tensors are on the CPU, and with `rank0_only` other ranks get an empty
    dict.
    """
    unit, number = _home(run, model)
    names, extra = exported(unit, number)
    here, to = True, None
    if not unit.has_whole_weights:
        here, to = run.world.rank == 0 or not rank0_only, torch.device("cpu")
    weights = _weights(unit, number, names, to=to if here else None)
    if not here:
        deque(weights, maxlen=0)
        return _OnRank0()
    found: dict[str, Any] = {name: tensor for keys, tensor in weights for name in keys}
    found |= extra if to is None else send_to_device(extra, to)
    order = [key for keys in names.values() for key in keys]
    whole = OrderedDict((key, found.pop(key)) for key in order if key in found)
    whole.update(found)
    versions = ((_key(unit, number, name), m) for name, m in unit.models[number].named_modules())
    whole._metadata = OrderedDict(  # type: ignore[attr-defined]  # for `load_state_dict`
        (name, {"version": module._version}) for name, module in versions
    )
    return whole


def _key(unit: Unit, number: int, name: str) -> str:
    start = unit.names.qualify(number, "")
    return unit.names.qualify(number, name).removeprefix(start).rstrip(".") if name else ""


def save_model(
    run: Run, model: nn.Module, directory: str | os.PathLike[str], *, limit: int | str, safe: bool, here: bool
) -> None:
    """Write the model's weights into `directory`. Collective.

    Args:
        run: the run.
        model: the model, prepared or not.
        directory: a local folder, or the URL of a store.
        limit: most bytes per file, as a number or as in "10GB".
        safe: write safetensors, instead of by `torch.save`.
        here: True on ranks that write.

    Raises:
        CheckpointError: a rank could not write the weights; raised on all ranks.
    """
    unit, number = _home(run, model)
    names, extra = exported(unit, number)
    weights = _weights(unit, number, names)

    def write() -> None:
        try:
            if here:
                write_weights(directory, weights, extra, limit, safe=safe)
        finally:
            # Collective: after an error this rank must still take part in making the other weights.
            deque(weights, maxlen=0)

    agree_on_call(run, "save_model")
    run_on_all_ranks(run.collectives("control"), "save_model: write", write)


def _home(run: Run, model: nn.Module) -> tuple[Unit, int]:
    """Return the model's unit and its number in the unit; a new unit for a model that was not prepared.

    Raises:
        AccelError: the model was not prepared, but shares weights with a prepared model of which this rank
            has parts.
    """
    run.require_alive()
    place = run.prepared.place_of(model)
    if place is None:
        for unit in run.units:
            _refuse_parts(unit, model)
        inner = run.prepared.inside_copy(model)
        unit = run.make_unit("unprepared", "single")
        unit.add_models([inner])
        unit.wrapped.append(inner)
        place = unit, 0
    owner, number = place
    owner.names.drop_cut_ties()
    return owner, number


def _refuse_parts(unit: Unit, model: nn.Module) -> None:
    """Refuse a model that shares weights of the unit of which this rank has parts."""
    asked = {*model.parameters()}
    shared = {name: each for name, each in unit.named_parameters().items() if each in asked}
    leaves = unit.hooks.model_state(unit) if shared else {}
    for name, each in shared.items():
        here = [tuple(tensor.shape) for _, tensor in leaf_of(each).shards]
        if name in leaves and here != [tuple(leaves[name].global_shape)]:
            kinds = ", ".join(type(each).__name__ for each in unit.models)
            raise AccelError(
                f"this {type(model).__name__} was not prepared, but has weights of the {kinds} that was, of"
                " which this rank has parts\npass the model that accelerator.prepare(...) returned"
            )
