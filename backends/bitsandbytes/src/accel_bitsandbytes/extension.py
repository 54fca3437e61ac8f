"""Extension `bitsandbytes`: quantised weights are saved completely and are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accel_bitsandbytes.adopting import adopt
from accel_bitsandbytes.layers import Quantised
from accel_core import hooks, implements

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Run, Unit

__all__ = ["BitsAndBytes"]


class BitsAndBytes:
    """Extension `bitsandbytes`, which adopts quantised layers and refuses to train them."""

    below: Any

    def __init__(self, config: Any, run: Run) -> None:
        self.config, self.run = config, run

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        for model in models:
            adopt(model)
        trained = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        return [
            f"an optimizer has {names[0]} of the {type(model).__name__}"
            + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            + ", quantised weights, which have no gradients\n"
            "pass it the parameters that require gradients:"
            " [p for p in model.parameters() if p.requires_grad]"
            for model in (*unit.models, *models)
            if (names := [name for name, weight in _quantised(model) if id(weight) in trained])
        ]

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "quantize":
            adopt(model)
        return model

    @implements(hooks.describe)
    def describe(self, unit: Unit) -> Sequence[str]:
        lines = []
        for model in unit.models:
            choices = [
                choice for each in model.modules() if (choice := vars(each).get("bitsandbytes_choice"))
            ]
            lines += [line for choice in choices for line in choice.lines()]
            if not choices and (names := [name for name, _ in _quantised(model)]):
                lines.append(f"by bitsandbytes, quantised before: {', '.join(names)}")
        return lines


def _quantised(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (f"{name}.weight", module.weight)
        for name, module in model.named_modules()
        if isinstance(module, Quantised)
    ]
