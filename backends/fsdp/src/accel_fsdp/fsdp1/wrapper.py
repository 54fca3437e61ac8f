"""torch's wrapper of version 1, and forwards of it whose backward does not come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_fsdp.fsdp1.flat_vectors import name_parameters

__all__ = ["Wrapper", "follow_forwards"]

_will_run: Final[Callable[[Any], bool]] = vars(torch._C)["_will_engine_execute_node"]


class Wrapper(FSDP):
    """torch's, which clears gradients of gathered weights too."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also between a forward and its backward, when parameters have no names."""
        for module in FSDP.fsdp_modules(self):
            if module._handle is not None:
                name_parameters(module._handle)
        super().zero_grad(set_to_none)


def follow_forwards(root: FSDP) -> None:
    """Have each backward reduce, also after a forward that had none: a batch that is skipped.

    torch hooks the node that accumulates gradients once until a backward. Where gathered weights have another
    dtype, each forward has another node, and what a second forward gives would be lost without a word.
    """
    hooked: dict[FSDP, list[tuple[Any, Any]]] = {}
    """Nodes of forwards that had no backward yet, with their hooks."""
    begun: set[FSDP] = set()
    """Modules that the forward which runs has not reached."""

    def begin(*call: Any) -> None:
        begun.clear()
        for module in FSDP.fsdp_modules(root) if torch.is_grad_enabled() else ():
            flat: Any = module._handle and module._handle.flat_param
            state: Any = getattr(flat, "_post_backward_hook_state", ())
            if len(state) == 2:  # a backward takes it away; frozen weights have one of another kind
                hooked.setdefault(module, []).append(state)
                begun.add(module)
                del flat._post_backward_hook_state
            else:
                hooked.pop(module, None)

    def reach(module: FSDP, *call: Any) -> None:
        flat: Any = module._handle and module._handle.flat_param
        state: Any = getattr(flat, "_post_backward_hook_state", ())
        if module not in begun or len(state) != 2:
            return
        begun.discard(module)
        node, handle = state
        reduce = handle.hooks_dict_ref()[handle.id]
        handle.remove()
        if node is hooked[module][-1][0]:
            flat._post_backward_hook_state = hooked[module].pop()
            return
        earlier = [each for each, _ in hooked[module]]

        def reduce_unless_earlier(*gradients: Any) -> None:
            if not any(map(_will_run, earlier)):  # which comes last, with the sum of all
                reduce(*gradients)

        flat._post_backward_hook_state = (node, node.register_hook(reduce_unless_earlier))

    root.register_forward_pre_hook(begin)
    for module in FSDP.fsdp_modules(root):  # its weights are gathered then, and torch's hook is there
        module.module.register_forward_pre_hook(partial(reach, module))
