"""State of delayed scaling as tensors: scales, and the histories of maxima from which they are computed.

Transformer Engine has the state in attributes of each layer (`fp8_meta`), and in buffers of the process that
it reduces over a group at the end of each forward with gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch

from accel_core import CheckpointError, Entry, get_logger

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Unit

__all__ = ["begin_anew", "collect", "drop_buffers", "forget_weights", "restore"]

logger = get_logger(__name__)
DIRECTIONS: Final = ("scaling_fwd", "scaling_bwd")
MAXIMA: Final = 5
"""Maxima of one product: input, weight, output, gradient of the output, gradient of the input."""
UNREDUCED: Final = "maxima of rank "
"""Prefix of the names of entries with maxima that are not reduced yet."""


@runtime_checkable
class HasOwnLayers(Protocol):
    """A wrapped model whose strategy built the layers, such as Megatron's."""

    def own_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name in the whole model, module) for the layers of this rank."""


def collect(unit: Unit, *, is_reduced: bool = True) -> dict[str, Entry]:
    """Return the scales and histories of the layers that have run on this rank.

    Each entry is a tensor of shape (1 + length of the history, number of maxima). The first row has the
    scales.

    The first row of a history has the maxima since the last reduction, which a forward without gradients
    leaves there. The next forward with gradients reduces them. Until then they differ between ranks, so each
    rank returns its own in a separate entry, and zeros in the common one. This function calls no collective,
    because one rank may save alone.

    Args:
        unit: the unit whose layers are read.
        is_reduced: True if ranks reduce maxima. If not, each rank has its own scales.
    """
    entries: dict[str, Entry] = {}
    unreduced: dict[str, torch.Tensor] = {}
    for name, layer in _layers(unit):
        if not _is_delayed(layer.fp8_meta):
            continue
        history = _concatenate(layer, "amax_history")
        if is_reduced and history[0].any():
            unreduced[name] = history[0].clone()
            history[0] = 0
        value = torch.cat([_concatenate(layer, "scale")[None], history])
        entries[name] = Entry(value=value, scope="replicated" if is_reduced else "per_rank")
    if unreduced:
        entries[f"{UNREDUCED}{unit.run.world.rank}"] = Entry(value=unreduced)
    return entries


def restore(unit: Unit, entries: Mapping[str, Entry], recipe: Any) -> None:
    """Restore the scales and histories that `collect` returned on all ranks.

    Layers that have not run yet are initialized first. Maxima that were not reduced are reduced here: each
    rank takes the largest, as the next forward would have done. Recipes without histories restore nothing.
    A pipeline stage restores its own layers. If the checkpoint has none of this model's layers, scales start
    from the beginning.

    Raises:
        CheckpointError: the checkpoint has other layers or histories of another length.
    """
    if not recipe.delayed():
        return
    layers = dict(_layers(unit))
    values: dict[str, Any] = {name: entry.value for name, entry in entries.items()}
    unreduced = [values.pop(name) for name in entries if name.startswith(UNREDUCED)]
    if values and layers.keys().isdisjoint(values):
        logger.warning(
            "fp8-te: the checkpoint has scales of other layers (%s, ...), as another strategy names them:"
            " scales start from the beginning",
            next(iter(values)),
        )
        return
    # A stage of a strategy's own layers has only a part of the names in the checkpoint.
    is_part = any(isinstance(wrapped, HasOwnLayers) for wrapped in unit.wrapped)
    for name, value in values.items():
        if name not in layers:
            if is_part:
                continue
            raise CheckpointError(
                f"fp8-te: the checkpoint has scales of {name}, which is not converted here\n"
                "convert the same layers (section fp8_te) as the run that saved it"
            )
        length = len(value) - 1
        if length != recipe.amax_history_len:
            raise CheckpointError(
                f"fp8-te: the checkpoint's histories have {length} steps, those here"
                f" {recipe.amax_history_len}\nset fp8_te.amax_history_len: {length}"
            )
        is_in_other_stage = any(weight.is_meta for weight in layers[name].parameters(recurse=False))
        if not is_in_other_stage:
            rows = [maxima[name] for maxima in unreduced if name in maxima]
            _fill(layers[name], _reduce(value, rows), recipe)


def _reduce(value: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an entry's value with the largest of all ranks' maxima in the history's first row."""
    largest = torch.stack([value[1], *rows]).amax(0)
    return torch.cat([value[:1], largest[None], value[2:]])


def _concatenate(layer: Any, part: str) -> torch.Tensor:
    """Return the forward's and the backward's part of a layer's state in one tensor on the CPU."""
    parts = [getattr(layer.fp8_meta[direction], part) for direction in DIRECTIONS]
    return torch.cat(parts, dim=-1).detach().cpu()


def _fill(layer: Any, values: torch.Tensor, recipe: Any) -> None:
    meta = layer.fp8_meta
    if not _is_delayed(meta):
        # The layer has not run yet. Its forward would allocate these tensors in the same way.
        meta["num_gemms"], meta["recipe"] = values.shape[1] // MAXIMA, recipe
        layer.init_fp8_meta_tensors(recipe)
    first = 0
    with torch.no_grad():
        for direction in DIRECTIONS:
            state = meta[direction]
            last = first + state.scale.numel()
            state.scale.copy_(values[0, first:last])
            state.amax_history.copy_(values[1:, first:last])
            first = last


def begin_anew(unit: Unit) -> None:
    """Reset scales and histories to their values before the first forward."""
    states = [
        layer.fp8_meta[direction]
        for _, layer in _layers(unit)
        if _is_delayed(layer.fp8_meta)
        for direction in DIRECTIONS
    ]
    with torch.no_grad():
        for state in states:
            state.scale.fill_(1)
            state.amax_history.zero_()


def forget_weights(unit: Unit) -> None:
    """Drop the float8 copies of weights after the weights were overwritten."""
    for _, layer in _layers(unit):
        getattr(layer, "_fp8_workspaces", {}).clear()


def drop_buffers(unit: Unit) -> None:
    """Remove the unit's layers from the library's buffers of maxima.

    The buffers belong to the process. A later run would reduce them over a group that no longer exists.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    # Newer releases have the buffers in an object, older ones in the class.
    state = getattr(Manager, "quantization_state", Manager)
    buffers = (state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer)
    for _, layer in _layers(unit):
        # The layer's entry is a flat tuple: index and key for the forward, index and key for the backward.
        for key in (layer.fp8_meta.pop(Manager.get_buffer_info(), None) or ())[1::2]:
            for buffer in buffers:
                buffer.pop(key, None)
            state.autocast_arguments.pop(key.partition("_")[2], None)


def _layers(unit: Unit) -> Iterator[tuple[str, Any]]:
    """Yield (canonical name, layer) for the unit's layers of Transformer Engine."""
    for number, model in enumerate(unit.models):
        for name, layer in _with_state(model.named_modules()):
            yield unit.qualify(number, name), layer
    for wrapped in unit.wrapped:
        if isinstance(wrapped, HasOwnLayers):
            yield from _with_state(wrapped.own_layers())


def _with_state(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    for name, layer in named:
        if isinstance(getattr(layer, "fp8_meta", None), dict):
            yield name, layer


def _is_delayed(meta: Mapping[str, Any]) -> bool:
    return all(hasattr(meta.get(direction), "amax_history") for direction in DIRECTIONS)
