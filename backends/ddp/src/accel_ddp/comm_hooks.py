"""Communication hooks.

What travels between ranks instead of the gradients themselves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accel_ddp.config import POWER_SGD, DDPCommunicationHookType

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from accel_ddp.config import DistributedDataParallelKwargs

__all__ = ["begin_anew", "forget_gradients", "iterations", "register", "settle"]

SETTLE_SECONDS: Final = 1.0

Hook = Callable[..., Any]
_Hook = DDPCommunicationHookType


def _on_any_device(hook: Hook) -> Hook:
    # torch refuses its bf16 hooks, by their names, where it knows no vendor library to carry them;
    # its CPU backend and third parties' carry bf16 too. One that cannot raises in the collective.
    @wraps(hook, assigned=())
    def carried(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    return carried


def _one_by_one(hook: Hook) -> Hook:
    # Power SGD starts its second all-reduce when the first is done, on the CPU's backend from any thread:
    # those of several buckets would meet in another order on another rank. Elsewhere (NCCL) the future is
    # done when the collectives are enqueued, and nothing is waited for.
    @wraps(hook, assigned=())
    def ordered(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        if not future.done():
            future.wait()
        return future

    return ordered


def _orthogonalize(matrices: Tensor, epsilon: float = 0) -> None:
    powerSGD_hook._orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


# Since pytorch#75157 torch's batched hook gives one matrix where a batch of them is asserted (2.13
# still does), and so fails at its first compressed step. The same hook, with a batch of one made of it.
_batched_power_sgd: Final = FunctionType(
    powerSGD_hook.batched_powerSGD_hook.__code__,
    vars(powerSGD_hook) | {"_orthogonalize": _orthogonalize},
    "batched_powerSGD_hook",
)

HOOKS: Final[Mapping[DDPCommunicationHookType, Hook]] = {
    _Hook.FP16: default_hooks.fp16_compress_hook,
    _Hook.BF16: _on_any_device(default_hooks.bf16_compress_hook),
    _Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
    _Hook.BATCHED_POWER_SGD: _batched_power_sgd,
}
WRAPPERS: Final[Mapping[DDPCommunicationHookType, Callable[[Hook], Hook]]] = {
    _Hook.FP16: default_hooks.fp16_compress_wrapper,
    _Hook.BF16: lambda hook: _on_any_device(default_hooks.bf16_compress_wrapper(hook)),
}


_states: WeakKeyDictionary[DistributedDataParallel, object] = WeakKeyDictionary()
_options: WeakKeyDictionary[DistributedDataParallel, Mapping[str, Any]] = WeakKeyDictionary()
_idle: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
"""Number of holders of a model's hook state while no hook runs."""


def register(model: DistributedDataParallel, config: DistributedDataParallelKwargs) -> None:
    """Register the hook that the config names, if any, wrapped and with its state."""
    if config.comm_hook is _Hook.NO:
        return
    hook = HOOKS[config.comm_hook]
    if config.comm_wrapper is not _Hook.NO:
        hook = WRAPPERS[config.comm_wrapper](hook)
    if config.comm_hook not in POWER_SGD:
        model.register_comm_hook(None, hook)
        return
    _states[model] = powerSGD_hook.PowerSGDState(model.process_group, **config.comm_state_option)
    _options[model] = config.comm_state_option
    model.register_comm_hook(_states[model], _one_by_one(hook))
    _idle[model] = sys.getrefcount(_states[model])


def iterations(model: DistributedDataParallel) -> int | None:
    """Return how many backwards a power SGD hook has seen; None without one."""
    state: Any = _states.get(model)
    return None if state is None else state.iter


def begin_anew(model: DistributedDataParallel, iterations: int) -> None:
    """Forget what a power SGD hook keeps of gradients.

    It compresses again from the third backward on: torch lays the buckets out in the first two, and what the
    hook keeps belongs to buckets.
    """
    state: Any = _states.get(model)
    if state is not None:
        state.__init__(state.process_group, **_options[model])
        state.iter = max(0, min(iterations, state.start_powerSGD_iter - 2))


def forget_gradients(model: DistributedDataParallel) -> None:
    """Drop what a power SGD hook keeps of gradients, as of ones not finite.

    It would add them to all that follow.
    """
    state: Any = _states.get(model)
    if state is not None:
        for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            kept.clear()


def settle(model: DistributedDataParallel) -> None:
    """Wait until no thread of torch is inside this model's hook any more.

    A millisecond, if at all.

    A power SGD hook holds state and process group. Backward returns when its result is there, and
    the thread that leaves the hook last must not be the one to destroy the group: it would wait for
    itself, and the process aborts (`Resource deadlock avoided`, also in plain torch).
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while model in _states and sys.getrefcount(_states[model]) > _idle[model] and time.monotonic() < deadline:
        time.sleep(0.001)
    _states.pop(model, None)
