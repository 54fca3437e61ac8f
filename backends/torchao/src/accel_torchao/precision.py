"""Precision `fp8-torchao`: float8 in chosen layers, bfloat16 elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor

from accel_core import ConfigError, hooks, implements
from accel_torchao.config import Float8Config
from accel_torchao.conversion import convert, library_config, refuse_scaled_inputs, try_recipe
from accel_torchao.layers import Choice, choose
from accel_torchao.scales import compute_scales_in, drop_scales

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Run, RunConfig, Unit

__all__ = ["Float8"]


class Float8:
    """Precision `fp8-torchao`. Layers are converted before a strategy shards or wraps the model."""

    below: Any

    def __init__(self, config: Float8Config | None, run: Run) -> None:
        self.config = config or Float8Config()
        self.run = run
        self._library: Any = None
        self._choices: WeakKeyDictionary[Unit, list[Choice]] = WeakKeyDictionary()
        self._undo: WeakKeyDictionary[Unit, list[Callable[[], None]]] = WeakKeyDictionary()

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        if not self.config.gathers or self.config.recipe == "tensorwise":
            return ()
        reason = (
            f"fp8_torchao.all_gather: recipe {self.config.recipe} has scales per row, which torchao does not"
            " gather\nset fp8_torchao.recipe: tensorwise, or leave all_gather out"
        )
        return [reason]

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "post" and self.config.gathers:
            self._require_gathered(unit, model)
            compute_scales_in(model)
        if phase == "post" and unit in self._choices:
            for choice in self._choices[unit]:
                self._undo[unit] += refuse_scaled_inputs(choice.chosen, self._checked_library())
        if phase != "convert":
            return model
        choice = choose(model, self.config)
        if not choice.chosen:
            skipped = "; ".join(f"{name or 'the model'}: {why}" for name, why in choice.skipped.items())
            raise ConfigError(
                f"fp8-torchao: no layer of the {type(model).__name__} would compute in float8"
                f" ({skipped or 'it has no linear layer'})\n"
                "change the options in section fp8_torchao, or train with mixed_precision: bf16"
            )
        library = self._checked_library()
        self._choices.setdefault(unit, []).append(choice)
        undo = convert(model, choice.chosen, library, self.run.device.type)
        self._undo.setdefault(unit, []).extend(undo)
        return model

    @implements(hooks.release)
    def release(self, unit: Unit) -> None:
        """Convert the layers back, because a later run may use another precision."""
        for undo in self._undo.pop(unit, ()):
            undo()

    @implements(hooks.autocast)
    def autocast(self, unit: Unit) -> Callable[[], AbstractContextManager[Any]] | None:
        options = self.run.config.autocast
        if not options.enabled:
            return None
        kind = self.run.device.type
        return partial(_contexts, kind, cache_enabled=options.cache_enabled)

    @implements(hooks.after_step)
    def after_step(self, unit: Unit, optimizer: Optimizer, applied: bool) -> None:
        if self.config.gathers:
            for model in unit.models:
                drop_scales(model)

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        choices = self._choices.get(unit, [])
        chosen = [name or "the model" for choice in choices for name in choice.chosen]
        skipped = [pair for choice in choices for pair in choice.skipped.items()]
        return [
            f"float8 ({'config' if self.config.config else self.config.recipe}): {', '.join(chosen)}",
            *(f"not float8: {name or 'the model'}: {reason}" for name, reason in skipped),
        ]

    def _checked_library(self) -> Any:
        """Return torchao's config after a trial on the run's device."""
        if self._library is None:
            library = library_config(self.config)
            source = (
                "fp8_torchao.config" if self.config.config else f"fp8_torchao.recipe {self.config.recipe}"
            )
            try_recipe(library, self.run.device, source)
            self._library = replace(library, enable_fsdp_float8_all_gather=self.config.gathers)
        return self._library

    def _require_gathered(self, unit: Unit, model: nn.Module) -> None:
        """Raise ConfigError if the strategy does not gather weights in float8."""
        for name, parameter in model.named_parameters():
            if hasattr(parameter, "fsdp_pre_all_gather") and not isinstance(parameter, DTensor):
                raise ConfigError(
                    f"fp8_torchao.all_gather: strategy {unit.strategy} does not gather {name} in float8\n"
                    "use strategy fsdp (version 2), or leave all_gather out"
                )


def _contexts(kind: str, *, cache_enabled: bool | None) -> AbstractContextManager[Any]:
    autocast = torch.autocast(kind, dtype=torch.bfloat16, cache_enabled=cache_enabled)
    return _outside_inference(autocast) if torch.is_inference_mode_enabled() else autocast


@contextmanager
def _outside_inference(context: AbstractContextManager[Any]) -> Iterator[None]:
    # torchao's tensors do not support operations in inference mode.
    with torch.inference_mode(False), torch.no_grad(), context:
        yield
