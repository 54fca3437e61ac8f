"""torch's wrapper, which refuses a gradient that it would not reduce; torch does not say so."""

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
"""Model -> weak reference to its run. Not in the model, which may be copied."""
COPIES: Final[WeakSet[nn.Module]] = WeakSet()
"""Deep copies and unpickled models, each with a reducer of its own."""


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's wrapper, under its name.

    It reduces the first backward after a forward of its own. Its probes, the first parameter of the model, of
    each child and of each child of a child, raise an error where they get any other gradient, as of a forward
    of the model inside. A static graph has none: one backward may bring it several gradients of a parameter.

    reduced: names of the parameters, as torch numbers them. probes: those. awaited: id of a probe -> whether
    the last forward's gradient is reduced, until it came.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments)
        ignored = self.parameters_to_ignore
        self.reduced = [n for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
        self._probe()

    def _probe(self) -> None:
        # By __dict__: the module's own __setattr__ takes 2 µs.
        self.__dict__["probes"] = probes = [] if self.static_graph else _probes(self.module)
        self.__dict__["awaited"] = {}
        self._hooks = [each.register_post_accumulate_grad_hook(self._received) for each in probes]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, whose gradients are reduced in backward."""
        if torch.is_grad_enabled():
            self._await(self.require_backward_grad_sync)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of buffers that are broadcast, or of buckets that are laid out
            if "finished reduction in the prior iteration" in str(error):
                raise _unfinished(self, error) from error
            raise

    def await_backward(self) -> None:
        """Count the next backward as reduced, whatever its forward ran in.

        The caller has prepared torch's reducer for it.
        """
        self._await(True)

    def _await(self, reduced: bool) -> None:
        state = self.__dict__
        state["awaited"] = dict.fromkeys(map(id, state["probes"]), reduced)

    def _received(self, probe: Tensor) -> None:
        if not self.require_backward_grad_sync:  # in no_sync, gradients stay this rank's
            return
        sharing = _wrappers_of(probe)
        if sharing[0] is not self:  # the first looks for all: this may be the backward of any
            return
        states = [each.__dict__["awaited"] for each in sharing]
        reduced = next((awaited for awaited in states if awaited.get(id(probe))), None)
        if reduced is not None:
            del reduced[id(probe)]
            return
        run = RUNS.get(self, _no_run)()
        unit = None if run is None else run.prepared.unit_of_model(self)
        is_quiet = any(id(probe) in each for each in states)  # its forward ran inside no_sync
        if is_quiet and unit is not None:  # another backward may reduce the sum
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
        # Hooks reach torch's reducer, which a copy makes anew. Its gradients travel uncompressed: torch
        # registers the hook that compresses them for one reducer.
        held: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        held |= {"probes": [], "awaited": {}, "_hooks": [], "_comm_hooks": []}
        # Its reducer has yet to record a static graph, and no no_sync will end for it.
        held["_static_graph_delay_allreduce_enqueued"] = False
        return held | {"require_backward_grad_sync": True, "require_forward_param_sync": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        COPIES.add(self)
        self._probe()

    def release(self) -> None:
        """Take the hooks off the parameters, and drop the reducer.

        One that outlives its process group aborts some processes at exit (plain torch on its CPU backend:
        2 of 8).
        """
        for hook in self._hooks:
            hook.remove()
        self.reducer = self.logger = None  # type: ignore[assignment]
        self.__dict__["forward"] = _released


def _released(*_: object, **__: object) -> NoReturn:
    raise AccelError(
        "forward: this model's DistributedDataParallel has ended, by free_memory or end_training\n"
        "prepare the model again, or use the one inside: accelerator.unwrap_model(model)"
    )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse parameters with hooks that step in backward, which would see unreduced gradients.

    Raises ConfigError.
    """
    for name, parameter in model.named_parameters():
        # Another wrapper of a shared parameter, or one that a failed `prepare` left, has its own here.
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
    """Return an error of ours for parameters that the last backward left out; torch numbers them."""
    numbers = re.search(r"did not receive grad for rank \d+:([\d ]+)", str(error))
    left = [model.reduced[int(index)] for index in numbers[1].split()] if numbers else []
    remedy = "set ddp.find_unused_parameters: true, or use every parameter in each loss"
    if model.find_unused_parameters:  # it looks at the forward's graph, where these are
        remedy = (
            "such parameters take part in the forward, and not in the loss: freeze them before prepare, with"
            " requires_grad_(False), or add them to the loss, times 0: loss + 0 * sum(p.sum() for p in"
            " model.parameters())"
        )
    return AccelError(
        f"ddp: the last backward of this {type(model.module).__name__} gave no gradient to"
        f" {', '.join(left[:3]) or 'some parameters'} ({len(left)} in all), so gradients are not averaged\n"
        + remedy
    )


def _no_run() -> None:
    return None


def _probes(module: nn.Module) -> list[Tensor]:
    """Return the first trained parameter of the module, of its children and of theirs."""
    children = [*module.children()]
    parts = (module, *children, *(each for child in children for each in child.children()))
    trained = ((p for p in part.parameters() if p.requires_grad) for part in parts)
    return [*dict.fromkeys(first for each in trained if (first := next(each, None)) is not None)]
