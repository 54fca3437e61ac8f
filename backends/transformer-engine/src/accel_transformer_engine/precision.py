"""Precision `fp8-te`: float8 in layers of Transformer Engine, bfloat16 elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from attrs import define, field

from accel_core import ConfigError, Entry, hooks, implements
from accel_transformer_engine.config import TransformerEngineConfig
from accel_transformer_engine.conversion import convert, drop_extra_state, fuse, watch
from accel_transformer_engine.inputs import Inputs
from accel_transformer_engine.layers import Choice, choose
from accel_transformer_engine.recipes import build_recipe, library, token_multiple
from accel_transformer_engine.scaling import begin_anew, collect, drop_buffers, forget_weights, restore

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Run, Unit

__all__ = ["TransformerEngine"]


@define
class _Converted:
    """The changes that `prepare` made to a unit's models."""

    choices: list[Choice] = field(factory=list)
    fused: list[str] = field(factory=list)
    undo: list[Callable[[], None]] = field(factory=list)
    before: Mapping[str, Entry] | None = None
    """Scales and histories from before a rehearsal; None if there was none."""


class TransformerEngine:
    """Precision `fp8-te`. Layers are converted before a strategy shards or wraps the model."""

    below: Any

    def __init__(self, config: TransformerEngineConfig | None, run: Run) -> None:
        self.config = config or TransformerEngineConfig()
        self.run = run
        self._converted: WeakKeyDictionary[Unit, _Converted] = WeakKeyDictionary()
        self._te: Any = None
        self._recipe: Any = None

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        if self._strategy_has_layers(unit):
            self._checked_recipe()
            return ()
        if unit.mesh is not None and unit.mesh.size("tp") > 1:
            reason = (
                "fp8-te: layers of Transformer Engine cannot compute with weights that a tensor-parallel plan"
                " has split\nleave out tensor parallelism, or use mixed_precision: fp8-torchao"
            )
            return [reason]
        return ()

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase != "convert" or self._strategy_has_layers(unit):
            return model
        recipe = self._checked_recipe()
        done = self._converted.setdefault(unit, _Converted())
        names, undo = fuse(model, self.config.fused or {})
        done.fused += names
        done.undo += undo
        choice = choose(model, self.config)
        if not names and not any(isinstance(layer, torch.nn.Linear) for layer in choice.chosen.values()):
            self._require_own_layers(model, choice)
        done.choices.append(choice)
        done.undo += convert(choice.chosen, self._te, partial(self._inputs, unit))
        done.undo += watch(model, partial(self._inputs, unit))
        done.undo += drop_extra_state(model)
        if recipe.delayed() and recipe.reduce_amax and self._group(unit) is not None:
            unit.set_forward_is_collective()
        return model

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        """Convert the layers back, because a later run may use another precision."""
        done = self._converted.pop(unit, None)
        if done is None:
            return
        if not self._converted:  # all units share the library's buffers
            drop_buffers(unit)
        for undo in reversed(done.undo):
            undo()

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
        self._converted.setdefault(unit, _Converted())
        if self._strategy_has_layers(unit):
            return None
        recipe, group = self._checked_recipe(), self._group(unit)
        if group is None and self.run.world.size > 1 and recipe.delayed():
            # Without a group the library would reduce over all ranks.
            recipe = copy.copy(recipe)
            recipe.reduce_amax = False
        return partial(self._contexts, unit, recipe, group)

    @implements(hooks.checkpoint_function)
    def checkpoint_function(self, unit: Unit) -> Callable[..., Any]:
        self._checked_recipe()
        contexts = partial(_recomputation, self._te)
        return partial(self._te.checkpoint, use_reentrant=False, context_fn=contexts)

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        recipe = self._checked_recipe()
        has_own = recipe.delayed() and not recipe.reduce_amax and self._group(unit) is not None
        return collect(unit, is_reduced=not has_own)

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        forget_weights(unit)
        begin_anew(unit)
        restore(unit, entries, self._checked_recipe())

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        if self._strategy_has_layers(unit):
            return [f"float8 ({type(self._recipe).__name__}): the layers of strategy {unit.strategy}"]
        done = self._converted.get(unit, _Converted())
        chosen = [name or "the model" for choice in done.choices for name in choice.chosen]
        skipped = [pair for choice in done.choices for pair in choice.skipped.items()]
        return [
            f"float8 ({type(self._recipe).__name__}): {', '.join(chosen)}",
            *(f"fused: {name}" for name in done.fused),
            *(f"not converted: {name or 'the model'}: {reason}" for name, reason in skipped),
        ]

    def _strategy_has_layers(self, unit: Unit) -> bool:
        """Return True if the strategy has its own layers of Transformer Engine, so that none is converted."""
        card = self.run.cards.get(unit.strategy)
        return card is not None and card.name == "megatron"

    def _checked_recipe(self) -> Any:
        if self._recipe is None:
            self._te = library()
            recipe = build_recipe(self.config, self._te)
            if recipe.delayed() and self.run.config.compile.backend not in (None, "no"):
                raise ConfigError(
                    "fp8_te.recipe delayed: Transformer Engine does not compile delayed scaling\n"
                    "set fp8_te.recipe: current, or leave out compilation"
                )
            self._recipe = recipe
        return self._recipe

    def _require_own_layers(self, model: nn.Module, choice: Choice) -> None:
        """Raise ConfigError unless the user's model contains layers of Transformer Engine."""
        if any(isinstance(getattr(part, "fp8_meta", None), dict) for part in model.modules()):
            return
        skipped = "; ".join(f"{name or 'the model'}: {why}" for name, why in choice.skipped.items())
        raise ConfigError(
            f"fp8-te: no layer of the {type(model).__name__} would compute in float8"
            f" ({skipped or 'it has no linear layer'})\n"
            "change the options in section fp8_te, or train with mixed_precision: bf16"
        )

    def _inputs(self, unit: Unit, name: str) -> Inputs:
        multiple, padded = token_multiple(self._recipe)
        card = self.run.cards.get(unit.strategy)
        return Inputs(
            name=name,
            unit=ref(unit),
            multiple=multiple,
            padded=padded if self.config.pad_tokens else 0,
            # A rank with parts of the weights would otherwise keep float8 copies of whole weights.
            keeps=card is not None and "whole_weights" in card.offers,
        )

    def _group(self, unit: Unit) -> Any:
        """Return the group over which maxima are reduced: all ranks of this pipeline stage."""
        if self.run.world.size == 1:
            return None
        mesh = unit.mesh
        names = () if mesh is None else tuple(dim.name for dim in mesh.dims if dim.size > 1)
        dim = "+".join(name for name in names if name != "pp") if "pp" in names else "world"
        return self.run.collectives(dim or "alone").group

    def _contexts(self, unit: Unit, recipe: Any, group: Any) -> AbstractContextManager[Any]:
        if recipe.delayed():
            self._forget_rehearsal(unit, recipe)
        options = self.run.config.autocast
        enabled = self.config.in_evaluation or any(model.training for model in unit.models)
        quantized = self._te.autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
        kind = self.run.device.type
        cast = (
            torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=options.cache_enabled)
            if options.enabled
            else nullcontext()
        )
        return _both(cast, quantized)

    def _forget_rehearsal(self, unit: Unit, recipe: Any) -> None:
        """Save scales and histories in a rehearsal, and restore them in the first forward after it.

        The numbers of a rehearsal are meaningless (see `Unit.rehearsal`), so its maxima must not count.
        """
        done = self._converted[unit]
        if unit.rehearses:
            done.before = collect(unit) if done.before is None else done.before
        elif done.before is not None:
            begin_anew(unit)
            restore(unit, done.before, recipe)
            done.before = None


def _recomputation(te: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its recomputation.

    The library updates the scales at the end of its outermost context. If the context of a recomputation were
    the outermost one, each recomputed block would push one more row into all histories. The additional
    context around it prevents this.
    """
    return nullcontext(), te.autocast(enabled=False)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
