"""Communication hooks of torch: compressed gradients are reduced in place of the gradients themselves."""

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
    # register_comm_hook checks the names of its bf16 hooks and accepts them only with NCCL or XCCL. gloo and
    # the backends of other vendors reduce bf16 too, so the hook is registered under another name. A backend
    # that cannot reduce bf16 raises in the collective.
    @wraps(hook, assigned=())
    def call_hook(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    return call_hook


def _one_by_one(hook: Hook) -> Hook:
    # Power SGD starts its second all-reduce in a callback of the first one. gloo runs callbacks in any of its
    # threads, so ranks could start the all-reduces of several buckets in different orders, and gradients
    # would be mixed up. Each bucket therefore waits for its result. With NCCL the future is already done when
    # the collectives are enqueued, and the wait costs nothing.
    @wraps(hook, assigned=())
    def call_and_wait(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        if not future.done():
            future.wait()
        return future

    return call_and_wait


def _orthogonalize(matrices: Tensor, epsilon: float = 0) -> None:
    powerSGD_hook._orthogonalize(matrices if matrices.dim() == 3 else matrices.unsqueeze(0), epsilon)


# Since pytorch#75157 torch's batched hook passes one matrix to a function that asserts a batch of matrices,
# and fails at its first compressed step (still in 2.13). This is the same hook with another `_orthogonalize`,
# which makes a batch of one matrix. torch's module is not changed.
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
"""Reference count of a model's hook state while no hook runs."""


def register(model: DistributedDataParallel, config: DistributedDataParallelKwargs) -> None:
    """Register the communication hook of the config on the model, with its wrapper and its state."""
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
    """Return the number of backwards that the model's power SGD hook has run; None if it has no such hook."""
    state: Any = _states.get(model)
    return None if state is None else state.iter


def begin_anew(model: DistributedDataParallel, iterations: int) -> None:
    """Reset the state of the model's power SGD hook and set its number of iterations.

    The hook compresses again from the third backward on. Its error feedback and warm start belong to buckets,
    and torch rebuilds the buckets during the first two backwards.
    """
    state: Any = _states.get(model)
    if state is not None:
        state.__init__(state.process_group, **_options[model])
        state.iter = max(0, min(iterations, state.start_powerSGD_iter - 2))


def forget_gradients(model: DistributedDataParallel) -> None:
    """Clear the error feedback and the warm start of the model's power SGD hook.

    Called after gradients that are not finite: the hook would add their error to all later gradients.
    """
    state: Any = _states.get(model)
    if state is not None:
        for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            memory.clear()


def settle(model: DistributedDataParallel) -> None:
    """Wait until no thread of torch runs the model's power SGD hook, for a millisecond at most as a rule.

    The hook's state holds the process group. Backward returns as soon as the result is ready, while a thread
    of torch may still be leaving the hook. If that thread drops the last reference to the group, it destroys
    the group and joins itself, and the process aborts with `Resource deadlock avoided`. Plain torch does so
    too.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while model in _states and sys.getrefcount(_states[model]) > _idle[model] and time.monotonic() < deadline:
        time.sleep(0.001)
    _states.pop(model, None)
