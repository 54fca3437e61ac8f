"""State of delayed scaling: scales and the maxima they come from, as tensors."""

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
"""Of one product: input, weight and output, and gradients of output and input."""
UNREDUCED: Final = "maxima of rank "
"""Start of the names of entries with maxima that are not reduced yet."""


@runtime_checkable
class HasOwnLayers(Protocol):
    """A wrapped model that computes in layers of the strategy's own."""

    def own_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """(name in the whole model, module) of this rank's."""


def collect(unit: Unit, *, is_reduced: bool = True) -> dict[str, Entry]:
    """Return scales and histories, by layer that has computed here.

    Each is a tensor of (1 + length of the history, maxima), whose first row has the scales.

    A forward without gradients leaves its maxima in the history's first row, and the next one with gradients
    reduces them. Until then each rank has others, and returns them in an entry of its own. No collective is
    called: one rank may save alone.

    is_reduced: whether ranks reduce maxima at all; else each has scales of its own.
    """
    entries: dict[str, Entry] = {}
    unreduced: dict[str, torch.Tensor] = {}
    for name, layer in _layers(unit):
        if not _is_delayed(layer.fp8_meta):
            continue
        history = _joined(layer, "amax_history")
        if is_reduced and history[0].any():
            unreduced[name] = history[0].clone()
            history[0] = 0
        value = torch.cat([_joined(layer, "scale")[None], history])
        entries[name] = Entry(value=value, scope="replicated" if is_reduced else "per_rank")
    if unreduced:
        entries[f"{UNREDUCED}{unit.run.world.rank}"] = Entry(value=unreduced)
    return entries


def restore(unit: Unit, entries: Mapping[str, Entry], recipe: Any) -> None:
    """Take back what `collect` gave on all ranks.

    Layers that have not computed yet get theirs too. Of maxima that were not reduced, each rank takes the
    largest, as the next forward would have done. Recipes without histories need none of it, and a pipeline
    stage needs that of its own layers. Where no layer has a name of the checkpoint's, scales begin anew.

    Raises:
        CheckpointError: some layers are others, or the history has another length.
    """
    if not recipe.delayed():
        return
    layers = dict(_layers(unit))
    values: dict[str, Any] = {name: entry.value for name, entry in entries.items()}
    unreduced = [values.pop(name) for name in entries if name.startswith(UNREDUCED)]
    if values and layers.keys().isdisjoint(values):
        logger.warning(
            "fp8-te: the checkpoint has scales of other layers (%s, ...), as another strategy names them:"
            " here scales begin anew",
            next(iter(values)),
        )
        return
    # Stages of a strategy's own layers do not have each other's.
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
        is_elsewhere = any(weight.is_meta for weight in layers[name].parameters(recurse=False))
        if not is_elsewhere:  # in another stage
            rows = [maxima[name] for maxima in unreduced if name in maxima]
            _fill(layers[name], _reduced(value, rows), recipe)


def _reduced(value: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    largest = torch.stack([value[1], *rows]).amax(0)
    return torch.cat([value[:1], largest[None], value[2:]])


def _joined(layer: Any, part: str) -> torch.Tensor:
    parts = [getattr(layer.fp8_meta[direction], part) for direction in DIRECTIONS]
    return torch.cat(parts, dim=-1).detach().cpu()


def _fill(layer: Any, values: torch.Tensor, recipe: Any) -> None:
    meta = layer.fp8_meta
    if not _is_delayed(meta):
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
    """Forget the maxima of earlier steps, as before the first forward."""
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
    """Drop the float8 copies of weights, which were overwritten."""
    for _, layer in _layers(unit):
        getattr(layer, "_fp8_workspaces", {}).clear()


def drop_buffers(unit: Unit) -> None:
    """Take the unit's layers out of the buffers that their group reduces.

    The buffers are those of the process. Later runs would reduce them over a group that is gone.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    held = getattr(Manager, "quantization_state", Manager)
    buffers = (held.global_amax_buffer, held.global_amax_history_buffer, held.global_scale_buffer)
    for _, layer in _layers(unit):
        # The index and the key of each direction.
        for key in (layer.fp8_meta.pop(Manager.get_buffer_info(), None) or ())[1::2]:
            for buffer in buffers:
                buffer.pop(key, None)
            held.autocast_arguments.pop(key.partition("_")[2], None)


def _layers(unit: Unit) -> Iterator[tuple[str, Any]]:
    """(canonical name, layer) of Transformer Engine's layers."""
    for number, model in enumerate(unit.models):
        for name, layer in _computing(model.named_modules()):
            yield unit.qualify(number, name), layer
    for wrapped in unit.wrapped:
        if isinstance(wrapped, HasOwnLayers):
            yield from _computing(wrapped.own_layers())


def _computing(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    for name, layer in named:
        if isinstance(getattr(layer, "fp8_meta", None), dict):
            yield name, layer


def _is_delayed(meta: Mapping[str, Any]) -> bool:
    return all(hasattr(meta.get(direction), "amax_history") for direction in DIRECTIONS)
