"""Parameters that get no gradient on some ranks: experts in a list, heads by rank.

torch's fully_shard reduces the gradients of a group in one buffer, which has only the parameters that got one
on this rank. Ranks that use different parameters would add up gradients of different parameters, silently, or
reduce buffers of different sizes, which ends a process or hangs. So in the first window, and in each with
`find_unused_parameters`, torch reduces zeros for the other parameters (`set_reduce_scatter_unused_params`),
and hooks note which parameters this rank used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from accel_core import AccelError
from accel_fsdp.sharding.accumulated import parameters_of
from accel_fsdp.sharding.agreement import before_update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from accel_core import Unit

__all__ = ["HAS_ZEROS", "Use", "check_use"]

HAS_ZEROS: Final = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""torch gives zeros to unused parameters: since 2.13."""


class Use:
    """The parameters of a unit that got a gradient, on this rank and on any."""

    def __init__(
        self,
        unit: Unit,
        modules: Sequence[FSDPModule],
        whole: Sequence[Tensor],
        mesh: DeviceMesh,
        *,
        finds: bool,
    ) -> None:
        self.finds = finds
        """True if ranks may use different parameters, in any step."""
        self.gives_zeros = HAS_ZEROS
        """True while torch gives zeros to unused parameters: in the first window, or always with `finds`."""
        self._unit, self._mesh = ref(unit), mesh
        self._unwatched = [*modules] if HAS_ZEROS else []
        self._watched: list[FSDPModule] = []
        self._noted: set[Tensor] = set()
        """Parameters whose use is noted; any other with a gradient counts as used."""
        self._used: set[Tensor] = set()
        self._handles: list[Any] = []
        if not HAS_ZEROS:
            return
        for parameter in whole:
            self._note(parameter)
        for module in modules:
            module.set_reduce_scatter_unused_params(finds, recurse=False)
            if finds:  # torch makes the leaves of a graph when it first gathers weights
                module.unshard()
                self._watch()
                module.reshard()
        if not finds:
            watch = torch.compiler.disable(self._watch)
            self._handles += [model.register_forward_hook(watch) for model in unit.models]

    def _watch(self, *call: Any) -> None:
        """Note gradients, and take zeros, in the modules whose weights were gathered."""
        for module in [*self._unwatched]:
            found = [*parameters_of(module)]
            if all(hasattr(one, "_unsharded_param") for one in found):
                for one in found:
                    self._note(one.sharded_param, one._unsharded_param)
                module.set_reduce_scatter_unused_params(True, recurse=False)
                self._unwatched.remove(module)
                self._watched.append(module)

    def _note(self, parameter: Tensor, *gathered: Tensor) -> None:
        for leaf in (parameter, *gathered) if parameter.is_floating_point() else ():
            trains = leaf.requires_grad
            handle = leaf.requires_grad_().register_hook(lambda _: self._used.add(parameter))
            leaf.requires_grad_(trains)  # it may be unfrozen later
            self._handles.append(handle)
        self._noted.add(parameter)

    def forget(self, optimizer: Optimizer) -> None:
        """Begin anew with parameters whose gradients were cleared."""
        if self._used:
            self._used.difference_update(p for group in optimizer.param_groups for p in group["params"])

    def settle(self) -> list[Tensor]:
        """Drop the zeros of parameters that no rank used, and return the parameters that only some used.

        Collective over the ranks that share the parameters.
        """
        unit = self._unit()
        assert unit is not None
        trained = [each for each in unit.named_parameters().values() if each.requires_grad]
        mine = [int(self._is_used(each)) for each in trained]
        both = torch.tensor([mine, [-has for has in mine]], device=unit.run.device)
        for dim in range(self._mesh.ndim):
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.get_group(dim))
        some, not_all = both.tolist()
        for parameter, is_used in zip(trained, some, strict=True):
            if not is_used:
                parameter.grad = None
            elif parameter.grad is not None:  # it may stay for another step
                parameter.grad._is_used = True  # type: ignore[attr-defined]
        self._used.clear()
        if any(some) and not self.finds:
            self._end()
        return [each for each, high, low in zip(trained, some, not_all, strict=True) if high != -low]

    def _is_used(self, parameter: Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None or parameter not in self._noted:
            return gradient is not None
        return parameter in self._used or hasattr(gradient, "_is_used")

    def _end(self) -> None:
        """Let torch reduce the gradients that exist from now on, and note nothing."""
        for handle in self._handles:
            handle.remove()
        for module in self._watched:
            module.set_reduce_scatter_unused_params(False, recurse=False)
        self._handles, self._watched, self._unwatched = [], [], []
        self._noted.clear()
        self.gives_zeros = False


def check_use(unit: Unit, optimizer: Optimizer, use: Use) -> None:
    """Have the optimizer step only gradients that are right for all ranks.

    For models whose heads or experts are used by some ranks only: torch's `fully_shard` would add up
    gradients of different parameters, without a word.

    With `find_unused_parameters`, the zeros of parameters that no rank used are dropped before each step.
    Without, ranks compare in the first step which parameters have a gradient. Later, each rank refuses a step
    in which others have one; parameters that are unfrozen are compared in their first step.
    """
    has: dict[Tensor, bool] = {}
    """Parameter -> whether it has a gradient in the steps in which it trains."""
    seen: list[bool | None] = []
    """The last step's result of `_found`."""

    def check(optimizer: Optimizer) -> None:
        nonlocal seen
        if use.finds:
            use.settle()
            return
        now = _found(optimizer)
        if now == seen:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        # `requires_grad` is the program's, the same on all ranks: each of them compares here, or none.
        if any(flag is not None and each not in has for each, flag in zip(parameters, now, strict=True)):
            apart, now, where = use.settle(), _found(optimizer), "on some ranks only"
        else:
            pairs = zip(parameters, now, strict=True) if any(now) else ()
            apart = [each for each, flag in pairs if flag is not None and flag is not has[each]]
            where = "in some steps only, and other ranks may differ"
        if apart:
            raise _refusal(unit, apart, where)
        if any(now):
            seen = now
            has.update((each, flag) for each, flag in zip(parameters, now, strict=True) if flag is not None)

    before_update(optimizer, check)


def _found(optimizer: Optimizer) -> list[bool | None]:
    """List for each parameter if it has a gradient; None if it is frozen and has none."""
    return [
        each.grad is not None or (False if each.requires_grad else None)
        for group in optimizer.param_groups
        for each in group["params"]
    ]


def _refusal(unit: Unit, parameters: Sequence[Tensor], where: str) -> AccelError:
    name_of: dict[Tensor, str] = {parameter: name for name, parameter in unit.named_parameters().items()}
    names = ", ".join(name_of[each] for each in parameters[:10])
    more = f" and {len(parameters) - 10} more" if len(parameters) > 10 else ""
    return AccelError(
        f"unit {unit.name!r}: {names}{more} got a gradient {where}; fully_shard would add up gradients of"
        " different parameters\nset fsdp.find_unused_parameters: true"
    )
