"""Forwards of version 1 whose backward does not come.

A batch that is skipped, a loss that is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Forwards"]

_will_run: Final[Callable[[Any], bool]] = vars(torch._C)["_will_engine_execute_node"]


class Forwards:
    """Has each backward reduce, also after a forward that had none.

    torch hooks the node that accumulates gradients once until a backward. Where gathered weights have another
    dtype, each forward has another node, and what a second forward gives would be lost without a word.

    A second backward is refused: the first one takes hooks and weights of all earlier forwards away.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = FSDP.fsdp_modules(root)
        self._hooked: dict[FSDP, list[tuple[Any, Any]]] = {}
        """Nodes of forwards that had no backward yet, with their hooks."""
        self._begun: set[FSDP] = set()
        """Modules that the forward which runs has not reached."""
        root.register_forward_pre_hook(self._begin)
        for module in self._modules:
            # Its weights are gathered then, and torch's hook is there.
            module.module.register_forward_pre_hook(partial(self._reach, module))
            handle: Any = module._handle
            if handle is not None:
                prepare = handle.prepare_gradient_for_backward
                vars(handle)["prepare_gradient_for_backward"] = partial(self._prepare, module, prepare)

    def _begin(self, *call: Any) -> None:
        self._begun.clear()
        for module in self._modules if torch.is_grad_enabled() else ():
            flat: Any = module._handle and module._handle.flat_param
            hooked: Any = getattr(flat, "_post_backward_hook_state", ())
            if len(hooked) == 2:  # a backward takes it away; frozen weights have one of another kind
                self._hooked.setdefault(module, []).append(hooked)
                self._begun.add(module)
                del flat._post_backward_hook_state
            elif hooked and any(p.requires_grad for p in flat._params):  # they were frozen, and are not now
                hooked[0].remove()
                del flat._post_backward_hook_state
            elif self._hooked:
                self._hooked.pop(module, None)

    def _reach(self, module: FSDP, *call: Any) -> None:
        if module not in self._begun:
            return
        self._begun.discard(module)
        flat: Any = module._handle and module._handle.flat_param
        hooked: Any = getattr(flat, "_post_backward_hook_state", ())
        if len(hooked) != 2:
            return
        node, handle = hooked
        reduce = handle.hooks_dict_ref()[handle.id]
        handle.remove()
        if node is self._hooked[module][-1][0]:
            flat._post_backward_hook_state = self._hooked[module].pop()
            return
        earlier = [each for each, _ in self._hooked[module]]

        def reduce_unless_earlier(*gradients: Any) -> None:
            if not any(map(_will_run, earlier)):  # which comes last, with the sum of all
                reduce(*gradients)

        flat._post_backward_hook_state = (node, node.register_hook(reduce_unless_earlier))

    def _prepare(self, module: FSDP, prepare: Callable[[], None]) -> None:
        """Refuse a backward whose weights or hook an earlier one has taken away."""
        handle: Any = module._handle
        flat = handle.flat_param
        earlier = self._hooked.pop(module, ())
        hooked = hasattr(flat, "_post_backward_hook_state") or any(_will_run(node) for node, _ in earlier)
        lacks = dist.get_world_size() > 1 and (module._sync_gradients or handle.needs_unshard())
        if flat.requires_grad and not hooked and lacks:
            raise AccelError(
                "fsdp_version 1 forgets earlier forwards in each backward, so a second backward (of another"
                " loss, or with retain_graph) has no weights and reduces nothing\n"
                "call backward once, with the sum of the losses; or call each backward before the next"
                " forward; or set fsdp.fsdp_version: 2"
            )
        prepare()
        if not handle.uses_sharded_strategy:
            # torch makes weights parameters again where their gradients come (none for frozen weights, nor in
            # a backward for inputs alone), and at the backward's end where a forward has left that to it.
            handle._unsharded_flat_param_for_skipped_views = flat
