"""torch's DistributedDataParallel with an error for gradients that it would not reduce."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn import parallel

from accel_core import AccelError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from accel_core import Run

__all__ = ["COPIES", "RUNS", "DistributedDataParallel", "refuse_hooks"]

RUNS: Final[WeakKeyDictionary[nn.Module, Callable[[], Run | None]]] = WeakKeyDictionary()
"""Model -> weak reference to its run. Not an attribute, because copy.deepcopy would copy the reference."""
COPIES: Final[WeakSet[nn.Module]] = WeakSet()
"""Wrapped models that were made by copy.deepcopy or pickle; each has its own reducer to release."""


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's wrapper, which raises if a backward computes gradients that it does not reduce.

    torch reduces only the first backward after a forward of the wrapper. A backward of another forward, such
    as a forward of `model.module`, silently leaves each rank with its own gradients. Some parameters, the
    probes, have a hook that raises in this case: the first parameter of the model, of each child and of each
    grandchild. With static_graph there are no probes, because one backward may then accumulate several
    gradients of a parameter.

    Attributes:
        reduced: names of the parameters, in torch's numbering.
        probes: parameters with a hook.
        awaited: id of a probe -> True if the gradient of the last forward will be reduced, False if that
            forward ran in no_sync. A probe is removed when its gradient arrives.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments)
        ignored = self.parameters_to_ignore
        self.reduced = [n for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
        self._probe()

    def _probe(self) -> None:
        # By __dict__, because Module.__setattr__ takes 2 µs and `awaited` is set in each forward.
        self.__dict__["probes"] = probes = [] if self.static_graph else _probes(self.module)
        self.__dict__["awaited"] = {}
        self._hooks = [each.register_post_accumulate_grad_hook(self._check_gradient) for each in probes]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward; its gradients are reduced in backward."""
        if torch.is_grad_enabled():
            self._await(self.require_backward_grad_sync)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of the broadcast of buffers, or of the new buckets
            if "finished reduction in the prior iteration" in str(error):
                raise _unfinished(self, error) from error
            raise

    def await_backward(self) -> None:
        """Expect a reduction in the next backward, also if its forward ran in no_sync.

        The caller has prepared torch's reducer for that backward.
        """
        self._await(True)

    def _await(self, reduced: bool) -> None:
        state = self.__dict__
        state["awaited"] = dict.fromkeys(map(id, state["probes"]), reduced)

    def _check_gradient(self, probe: Tensor) -> None:
        if not self.require_backward_grad_sync:  # in no_sync no gradient is reduced
            return
        # Models that share the parameter each have a hook on it. This backward may be of any of them, so the
        # first wrapper looks for the forward in the states of all.
        sharing = _wrappers_of(probe)
        if sharing[0] is not self:
            return
        states = [each.__dict__["awaited"] for each in sharing]
        reduced = next((awaited for awaited in states if awaited.get(id(probe))), None)
        if reduced is not None:
            del reduced[id(probe)]
            return
        run = RUNS.get(self, _no_run)()
        unit = None if run is None else run.prepared.unit_of_model(self)
        ran_in_no_sync = any(id(probe) in each for each in states)
        if ran_in_no_sync and unit is not None:
            # A later backward of the window may still reduce the sum. Otherwise the unit's step raises.
            unit.note_unreduced()
            return
        raise AccelError(
            f"ddp: this backward of {type(self.module).__name__} is not reduced, and each rank would train a"
            " model of its own: it is no gradient of this wrapper's last forward, but of the model inside or"
            " a part of it, or of a second backward\n"
            "call the model that prepare returned, then backward once, with the sum of the losses; gradients"
            " that you reduce yourself are computed inside accelerator.no_sync(model)"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Hooks refer to torch's reducer, and a copy builds its own reducer. A copy does not compress its
        # gradients, because a communication hook is registered for one reducer.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state |= {"probes": [], "awaited": {}, "_hooks": [], "_comm_hooks": []}
        # The copy's reducer has not recorded a static graph. A copy that was made inside no_sync never sees
        # the end of that context, so it starts with the flags of a model outside of it.
        state["_static_graph_delay_allreduce_enqueued"] = False
        return state | {"require_backward_grad_sync": True, "require_forward_param_sync": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        COPIES.add(self)
        self._probe()

    def release(self) -> None:
        """Remove the hooks from the parameters and drop the reducer.

        A reducer that outlives its process group aborts some processes at exit (2 of 8 with plain torch and
        gloo).
        """
        for hook in self._hooks:
            hook.remove()
        self.reducer = self.logger = None  # type: ignore[assignment]
        self.__dict__["forward"] = _refuse_forward


def _refuse_forward(*_: object, **__: object) -> NoReturn:
    raise AccelError(
        "forward: this model's DistributedDataParallel has ended, by free_memory or end_training\n"
        "prepare the model again, or use accelerator.unwrap_model(model)"
    )


def refuse_hooks(model: nn.Module) -> None:
    """Raise ConfigError if a parameter has a hook that would see, or step with, unreduced gradients."""
    for name, parameter in model.named_parameters():
        # A second wrapper of a shared parameter, or the wrapper of a `prepare` that failed, has its own hook.
        if len(parameter._post_accumulate_grad_hooks or ()) > len(_wrappers_of(parameter)):
            raise ConfigError(
                f"ddp: {name} of the {type(model).__name__} has a hook by"
                " register_post_accumulate_grad_hook, which would see, or step with, the gradient of this"
                " rank alone\n"
                "do its work between backward and optimizer.step(), or choose strategy fsdp"
            )


def _wrappers_of(probe: Tensor) -> list[DistributedDataParallel]:
    hooks = (probe._post_accumulate_grad_hooks or {}).values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return [each for each in owners if isinstance(each, DistributedDataParallel)]


def _unfinished(model: DistributedDataParallel, error: RuntimeError) -> AccelError:
    """Return an error with the names of the parameters without gradients; torch's error has their numbers."""
    numbers = re.search(r"did not receive grad for rank \d+:([\d ]+)", str(error))
    unused = [model.reduced[int(index)] for index in numbers[1].split()] if numbers else []
    remedy = "set ddp.find_unused_parameters: true, or use every parameter in each loss"
    if (
        model.find_unused_parameters
    ):  # it finds parameters that the forward did not use; the forward used these
        remedy = (
            "such parameters take part in the forward, and not in the loss: freeze them before prepare, with"
            " requires_grad_(False), or add them to the loss, times 0: loss + 0 * sum(p.sum() for p in"
            " model.parameters())"
        )
    return AccelError(
        f"ddp: the last backward of this {type(model.module).__name__} gave no gradient to"
        f" {', '.join(unused[:3]) or 'some parameters'} ({len(unused)} in all), so gradients are not"
        " averaged\n" + remedy
    )


def _no_run() -> None:
    return None


def _probes(module: nn.Module) -> list[Tensor]:
    """Return the first trainable parameter of the module, of each child and of each grandchild."""
    children = [*module.children()]
    parts = (module, *children, *(each for child in children for each in child.children()))
    trained = ((p for p in part.parameters() if p.requires_grad) for part in parts)
    return [*dict.fromkeys(first for each in trained if (first := next(each, None)) is not None)]
