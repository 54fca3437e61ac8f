"""Whether gradients are those of all ranks: torch's wrapper says nothing where they are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn import parallel

from accel_core import AccelError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from accel_core import Run, Unit

__all__ = ["RUNS", "DistributedDataParallel", "follow", "refuse_hooks"]

_READY: Final = "ready"
RUNS: Final[WeakKeyDictionary[nn.Module, Callable[[], Run | None]]] = WeakKeyDictionary()
"""Model -> a weak reference to the run that prepared it. Not in the model, which may be copied."""
_REASONS: Final = {
    "none": "was called on the model inside, or on a part of it: only the forward of the model that"
    " prepare returned has its gradients reduced",
    "used": "is the second of one forward (retain_graph), or of two forwards in a row, or was called on a"
    " part of the model: only the first backward after a forward is reduced",
    "quiet": "ran outside no_sync, but its forward ran inside: no gradients were reduced"
    " (accelerator.sync_gradients = True stands before the forward)",
}


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's wrapper, under its name, which notes whether each backward reduces.

    `awaited` says of each parameter that is asked whether its next gradient would be reduced, and else why
    not; `last` what it was at the last one of any. `late` holds the parameters that were frozen here and got
    a gradient since the last step.
    """

    awaited: list[str]
    last: str | None
    late: set[Tensor]

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments)
        asked = _asked(module)
        self.__dict__.update(awaited=["none"] * len(asked), last=None, checked=False, late=set())
        ignored = self.parameters_to_ignore
        self.reduced = [n for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
        self._hooks = [_when_unfrozen(p, self.late.add) for p in module.parameters() if _may_train_later(p)]
        notes = [_noting(self, number) for number in range(len(asked))]
        self._hooks += [
            p.register_post_accumulate_grad_hook(note) for p, note in zip(asked, notes, strict=True)
        ]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's, with gradients that are reduced in backward."""
        if torch.is_grad_enabled():
            state = self.__dict__  # the module's own __setattr__ takes 2 µs
            word = _READY if state["require_backward_grad_sync"] else "quiet"
            state["awaited"] = [word] * len(state["awaited"])
            if not state["checked"]:
                refuse_hooks(self.module, allowed=len(self._hooks))
                state["checked"] = True
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of buffers that are broadcast, or of buckets that are laid out
            run = RUNS.get(self, _no_run)()
            lost = None if run is None else run.lost_peer("forward", error)
            if lost is None:
                raise
            raise lost from error

    def refuse(self, last: str | None) -> None:
        """Raises AccelError: the gradients are this rank's alone. `last`: of the last backward."""
        kind = type(self.module).__name__
        if last not in (None, _READY):
            raise AccelError(
                f"ddp: the last backward of this {kind} {_REASONS[str(last)]}; each rank would"
                " train a model of its own\n"
                "call the prepared model, then backward once; put both into no_sync, or none"
            )
        names = [name for name, p in self.module.named_parameters() if p in self.late]
        self.late.clear()
        raise AccelError(
            f"ddp: {len(names)} parameter(s) of this {kind} were frozen when it was prepared and train"
            f" now ({names[0]}): their gradients are not reduced\n"
            "unfreeze before prepare, or call accelerator.free_memory() and prepare the model again"
        )

    def refuse_unfinished(self) -> None:
        """Raises AccelError: the last backward left out parameters, for which torch still waits."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+:([\d ]+)", str(error))
            left = [self.reduced[int(index)] for index in found[1].split()] if found else []
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise AccelError(
                f"ddp: the last backward of this {type(self.module).__name__} gave no gradient to"
                f" {', '.join(left[:3]) or 'some parameters'}{more}, so gradients are not averaged\n"
                "set ddp.find_unused_parameters: true, or use every parameter in each loss"
            ) from error

    def unwatch(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def refuse_hooks(model: nn.Module, allowed: int = 0) -> None:
    """Raises ConfigError: parameters have more than `allowed` hooks that would see unreduced gradients."""
    hooks = {name: len(p._post_accumulate_grad_hooks or ()) for name, p in model.named_parameters()}
    if sum(hooks.values()) > allowed:
        hooked = max(hooks, key=lambda name: hooks[name])
        raise ConfigError(
            f"ddp: {hooked} of the {type(model).__name__} has a hook by register_post_accumulate_grad_hook,"
            " which would see, or step with, the gradient of this rank alone\n"
            "do its work between backward and optimizer.step(), or choose strategy fsdp"
        )


def follow(unit: Unit, optimizer: Optimizer) -> RemovableHandle:
    """Have the unit's models checked before each step of the optimizer, until the handle is removed."""

    def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1 or kwargs.get("closure") is not None:  # it has yet to compute the gradients
            return _checked(unit, *args, **kwargs)
        _check(unit)
        return None

    return optimizer.register_step_pre_hook(before)


def _check(unit: Unit) -> None:
    for model in unit.wrapped:
        if isinstance(model, DistributedDataParallel):
            state = model.__dict__
            last, state["last"] = state["last"], None
            if model.static_graph:
                state["awaited"] = ["none"] * len(state["awaited"])
            if state["late"] or last not in (None, _READY):
                if not unit.silent:
                    model.refuse(last)
                model.late.clear()
            model.refuse_unfinished()


def _checked(
    unit: Unit, optimizer: Optimizer, closure: Callable[[], Any], *more: Any, **options: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step, with a closure that is checked each time it has computed gradients."""

    def watched() -> Any:
        loss = closure()
        _check(unit)
        return loss

    return (optimizer, watched, *more), options


def _no_run() -> None:
    return None


def _asked(module: nn.Module) -> list[nn.Parameter]:
    """The first parameter that trains of the module, and of each child: a part that may be called."""
    parts = (module, *module.children())
    found = (next((p for p in part.parameters() if p.requires_grad), None) for part in parts)
    return [p for p in dict.fromkeys(found) if p is not None]


def _may_train_later(parameter: Tensor) -> bool:
    floating = parameter.is_floating_point() or parameter.is_complex()
    return floating and not parameter.requires_grad and not parameter.is_inference()


def _when_unfrozen(parameter: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
    """Have it noted when a frozen parameter gets a gradient: nothing has to be asked in a step."""
    parameter.requires_grad_(True)  # torch takes a hook of what trains only, and keeps it
    hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
    parameter.requires_grad_(False)
    return hook


def _noting(model: DistributedDataParallel, number: int) -> Callable[[Tensor], None]:
    state = model.__dict__
    once = not model.static_graph  # else a parameter may be ready several times in one backward

    def note(parameter: Tensor) -> None:
        awaited = state["awaited"]
        state["last"] = awaited[number]
        if once and awaited[number] == _READY:
            awaited[number] = "used"

    return note
