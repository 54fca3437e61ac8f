"""Linear layers that torchao computes in fp8, chosen by Accelerate's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from accel_compat.environment.libraries import torchao_required


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Tell whether a layer fits and is not among those that are left out."""
    fits = not isinstance(module, nn.Linear) or not (module.in_features % 16 or module.out_features % 16)
    return fits and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """`filter_linear_layers` without the first and last layers of the module itself."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Tell whether torchao has converted a layer."""
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(part, Float8Linear) for part in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Convert linear layers in place, but by default not the first and the last.

    Accelerator(mixed_precision="fp8") does it in `prepare`.
    """
    from torchao.float8 import convert_to_float8_training

    ends = find_first_last_linear_layers(model)
    chosen = module_filter_func or partial(filter_linear_layers, layers_to_filter=ends)
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)
