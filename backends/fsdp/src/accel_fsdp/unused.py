"""Parameters that get no gradient on some ranks.

Experts in a list, heads by rank, blocks that are skipped.

torch's fully_shard reduces what got a gradient on each rank, in one buffer: ranks that use different
parameters would add up gradients of different parameters. Here a zero takes part where there is none,
and a parameter that no rank has used keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["Unused", "followed", "is_kept", "parameter_groups"]

NOT_RUN, WITHOUT, WITH = range(3)
"""State after a backward: its group did not run, a zero, or a gradient."""


class Unused:
    """The parameters of a sharded model that a backward has left without gradient.

    Ranks compare in the first backward that reduces; if nothing is left out there, later ones cost nothing,
    and one that leaves something out is refused. always: ranks compare in each.
    rehearses: whether a backward is none of the user's; what it gives is dropped.
    """

    def __init__(
        self, unit: Unit, model: nn.Module, mesh: DeviceMesh, *, always: bool, rehearses: Callable[[], bool]
    ) -> None:
        self.unit, self.always, self.rehearses, self.compares = unit, always, rehearses, True
        self.ranks = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self.unreduced = False
        """True if the last backward ran in no_sync: no parameter has a gradient of it."""
        self.left: dict[FSDPParam, bool] = {}
        """Parameters with a zero -> True if an earlier backward gave a gradient."""
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        states = [module._get_fsdp_state() for module in modules]
        self.groups = [group for state in states for group in parameter_groups(state)]
        self.parameters = [fsdp_param for group in self.groups for fsdp_param in group.fsdp_params]
        for state in states:
            vars(state)["_root_post_backward_final_callback"] = self._followed(
                state._root_post_backward_final_callback
            )
        for parameter in self.parameters:
            parameter.__class__ = _Parameter
            vars(parameter)["_unused"] = self
        for module in modules:
            if hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)
            else:  # torch before 2.13
                for group in parameter_groups(module._get_fsdp_state()):
                    vars(group)["post_backward"] = partial(_with_zeros, group, group.post_backward)

    def zero(self, parameter: FSDPParam, zero: Tensor) -> Tensor:
        """Note that `zero` stands for a gradient.

        In the dtype of those that have been accumulated.
        """
        self.left[parameter] = parameter.sharded_param.grad is not None
        accumulated = self.unit.window.index > 0 and parameter.reduce_dtype is not None
        return zero.to(parameter.reduce_dtype) if accumulated else zero

    def _followed(self, finish: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            finish()
            if self.rehearses():
                for each in [each for each, had in self.left.items() if not had]:
                    each.sharded_param.grad = None
                self.left = {}
                return
            self.unreduced = not self.groups[0].reduce_grads
            if (self.left or self.compares) and not self.unreduced:
                left, self.left = self.left, {}
                self._compare(left)

        return ended

    def refuse_unreduced(self, optimizer: Optimizer, *arguments: Any) -> None:
        """Refuse a step that would train nothing.

        Torch keeps such gradients apart. Raises AccelError.
        """
        if self.unreduced and any(map(is_kept, self.parameters)):
            raise AccelError(
                f"unit {self.unit.name!r}: the last backward ran inside no_sync, so no gradient is reduced"
                " and optimizer.step() would train nothing\n"
                "run the last backward before a step outside no_sync, or use accelerator.accumulate"
            )

    def _compare(self, left: dict[FSDPParam, bool]) -> None:
        """Compare parameters without a gradient. Collective, where ranks compare."""
        if not self.compares:
            raise AccelError(
                f"unit {self.unit.name!r}: {self._names(left)} got no gradient on this rank. In the first"
                " step all parameters did, and since then ranks do not compare which did\n"
                "set fsdp.find_unused_parameters: true"
            )
        trained = [parameter for parameter in self.parameters if parameter.sharded_param.requires_grad]
        mine = [WITHOUT if each in left else _has_gradient(each) for each in trained]
        if not trained:
            return
        both = torch.tensor([mine, [-state for state in mine]], device=self.unit.run.device)
        for ranks in self.ranks:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=ranks)
        most, least = both.tolist()
        apart = [each for each, high, low in zip(trained, most, least, strict=True) if high and not low]
        if apart:
            raise AccelError(
                f"unit {self.unit.name!r}: only some ranks ran the modules of {self._names(apart)}, which"
                " are sharded by themselves: their weights were gathered from ranks that gave others\n"
                "run them on all ranks, or choose fsdp.auto_wrap_policy so that they are sharded with the"
                " module around them"
            )
        for each, high in zip(trained, most, strict=True):
            if high == WITHOUT and not left[each]:
                each.sharded_param.grad = None
        self.compares = self.always or any(-low < WITH for low in least)

    def _names(self, parameters: Sequence[FSDPParam] | dict[FSDPParam, bool]) -> str:
        names = {parameter: name for name, parameter in self.unit.named_parameters().items()}
        found = [names.get(parameter.sharded_param, "a parameter") for parameter in parameters]
        return ", ".join(found[:10])


def followed(models: Sequence[nn.Module]) -> set[Unused]:
    """Return the trackers of unused parameters in these models."""
    modules = (part for model in models for part in model.modules() if isinstance(part, FSDPModule))
    groups = (group for module in modules for group in parameter_groups(module._get_fsdp_state()))
    found = (vars(fsdp_param).get("_unused") for group in groups for fsdp_param in group.fsdp_params)
    return {each for each in found if each is not None}


class _Parameter(FSDPParam):
    """torch's, which tells of the zero that it gives for a gradient."""

    _unused: Unused

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        zero: Tensor = super().unsharded_zero_grad_data
        return self._unused.zero(self, zero)

    @property
    def unsharded_grad_data(self) -> Tensor:
        # Of several forwards in one backward, the earlier ones end before the gradient of all is there.
        self._unused.left.pop(self, None)
        gradient: Tensor = super().unsharded_grad_data
        return gradient

    def take_zero(self) -> None:
        """Hold a zero if there is no gradient, where torch 2.13 takes one."""
        if not (hasattr(self, "_unsharded_param") and self.unsharded_param.requires_grad):
            return
        if self.unsharded_accumulated_grad is None and self.unsharded_param.grad is None:
            zero = torch.zeros_like(self.unsharded_param)
            self.unsharded_accumulated_grad = self._unused.zero(self, zero)


def _with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    if group.reduce_grads:
        for parameter in group.fsdp_params:
            parameter.take_zero()
    post_backward(*unused)


def _has_gradient(parameter: FSDPParam) -> int:
    return NOT_RUN if parameter.sharded_param.grad is None else WITH


def is_kept(parameter: FSDPParam) -> bool:
    """Return whether the parameter has a gradient that is not reduced yet."""
    gathered = getattr(parameter, "_unsharded_param", None)
    kept: bool = parameter.unsharded_accumulated_grad is not None or (
        gathered is not None and gathered.grad is not None
    )
    return kept


def parameter_groups(state: Any) -> list[Any]:
    """Return the state's parameter groups; torch up to 2.10 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
