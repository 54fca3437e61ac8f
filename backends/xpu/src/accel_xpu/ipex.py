"""Extension `ipex`: `ipex.optimize` of intel-extension-for-pytorch, on Intel's CPUs and GPUs.

Options that would store weights in a form of ipex's own (packed, or split bfloat16) are off. Names, weights,
optimizer state and checkpoints are therefore torch's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict
from torch.optim import Optimizer

from accel_core import ConfigError, hooks, implements
from accel_xpu.config import IpexConfig

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Run, RunConfig, Unit

__all__ = ["Ipex"]

_EAGER: Final = r"(aten::layer_norm|torch_ipex::\w+): an autograd kernel was not registered"
"""torch's warning about operators of ipex. In eager mode their gradients are right."""
_COMPILED: Final = (
    "compiled code loses the backward of ipex's operators: parameters before a layer norm get no gradient"
)


class Ipex:
    """Extension `ipex`. Models without an optimizer are not changed."""

    def __init__(self, config: IpexConfig | None, run: Run) -> None:
        self.config = config or IpexConfig()
        self.run = run

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        backend = config.compile.backend or "no"
        if backend.lower() == "no":
            return []
        return [f"compile.backend is {backend!r}, and {_COMPILED}\nleave ipex or torch.compile out"]

    @implements(hooks.refuse_unit)
    def refuse_unit(
        self, unit: Unit, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> Sequence[str]:
        reasons, kind = [], self.run.device.type
        if kind not in ("cpu", "xpu"):
            reasons.append(f"ipex optimizes for Intel's CPUs and GPUs, this run is on {kind}; leave ipex out")
        if kind == "xpu" and (self.config.optimize_lstm or self.config.auto_kernel_selection):
            reasons.append("ipex has optimize_lstm and auto_kernel_selection for CPUs only; leave them unset")
        if any(map(_is_compiled, models)):
            reasons.append(f"a model was compiled by torch.compile, and {_COMPILED}; leave one of them out")
        if optimizers and not models:
            reasons.append("ipex optimizes a model and its optimizer together; prepare them in one call")
        return reasons

    @implements(hooks.transform_model)
    def transform_model(self, unit: Unit, model: nn.Module, phase: str) -> nn.Module:
        if phase == "convert":
            for number, optimizer in enumerate(_optimizers_of(model, unit.optimizers)):
                model = self._optimize(model, optimizer, again=number > 0)
        return model

    def _optimize(self, model: nn.Module, optimizer: Optimizer, again: bool) -> nn.Module:
        if self.run.device.type == "xpu":  # ipex optimizes for the device of the parameters
            model = model.to(self.run.device)
        _hide_warning_until_compilation()
        training, step = model.training, optimizer.step
        # ipex accepts an optimizer only if the outermost module is in training mode.
        model.training = True
        options = {"inplace": True, "weights_prepack": False, **asdict(self.config)}
        options["optimize_lstm"] = self.config.optimize_lstm and not again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # ipex calls deprecated functions of torch
            import intel_extension_for_pytorch as ipex

            model, same = ipex.optimize(model, optimizer=optimizer, **options)
        model.training = training
        assert same is optimizer
        if getattr(optimizer, "fused", False):
            optimizer.step = _with_step_hooks(optimizer, step)
        elif self.config.fuse_update_step:
            raise ConfigError(
                f"ipex.fuse_update_step: ipex has no fused step of {type(optimizer).__name__} on"
                f" {self.run.device.type}\nleave the option unset to use torch's step, or use Adam or SGD"
            )
        return model


def _hide_warning_until_compilation() -> None:
    """Ignore torch's warning, which is wrong in eager mode, until the process compiles something."""
    from torch._dynamo.callback import callback_handler

    if _warn_on_compilation not in callback_handler.start_callbacks:
        warnings.filterwarnings("ignore", _EAGER, UserWarning)
        callback_handler.register_start_callback(_warn_on_compilation)


def _warn_on_compilation(_: object) -> None:
    from torch._dynamo.callback import callback_handler

    callback_handler.remove_start_callback(_warn_on_compilation)
    warnings.filterwarnings("default", _EAGER, UserWarning)
    warnings.warn(
        "a model is being compiled in a process in which ipex has optimized a model; if both are the same"
        f" model, {_COMPILED}\nleave ipex or torch.compile out",
        UserWarning,
        stacklevel=2,
    )


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _optimizers_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    ids = {id(parameter) for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])
    ]


def _with_step_hooks(optimizer: Optimizer, before: Any) -> Any:
    """Return ipex's fused step with the calls that torch adds to a step.

    The step runs the optimizer's step hooks. Schedulers that were made before `prepare` see that it ran, and
    do not warn that they step before the optimizer.
    """
    fused = Optimizer.profile_hook_step(optimizer.step.__func__)  # type: ignore[attr-defined]
    if not hasattr(before, "_wrapped_by_lr_sched"):
        return MethodType(fused, optimizer)

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        self._opt_called = True
        return fused(self, *arguments, **options)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return MethodType(step, optimizer)
