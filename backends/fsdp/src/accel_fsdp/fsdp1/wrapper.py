"""torch's wrapper of version 1, and gradients that it does not reduce."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it

from accel_core import AccelError
from accel_fsdp.fsdp1.flat_vectors import name_parameters

__all__ = ["Wrapper", "refuse_frozen", "refuse_lost_gradients"]


class Wrapper(FSDP):
    """torch's, which clears gradients of gathered weights too."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also between a forward and its backward, when parameters have no names."""
        for module in FSDP.fsdp_modules(self):
            if module._handle is not None:
                name_parameters(module._handle)
        super().zero_grad(set_to_none)


def refuse_frozen(modules: Iterable[FSDP]) -> None:
    """Refuse a forward that would drop gradients: of blocks that were frozen before their step.

    torch takes the gradients of frozen parameters away at the end of the forward. A GAN that freezes its
    discriminator for the generator's backward, and steps both afterwards, does so.
    """
    for module in modules:
        flat: Any = module._handle and module._handle.flat_param
        params = () if flat is None else flat._params
        if any(p.grad is not None for p in params) and not any(p.requires_grad for p in params):
            raise AccelError(
                "a block was frozen while it has gradients that no step has used, and fsdp_version 1 drops"
                " the gradients of frozen parameters\n"
                "freeze it after its step and zero_grad, or set fsdp.fsdp_version: 2"
            )


def refuse_lost_gradients(modules: Iterable[FSDP]) -> None:
    """Refuse gradients that a backward has left whole: no other rank has seen them.

    torch hooks its reduction to the forward that comes first after a backward. If weights are gathered in
    another dtype and that forward has no backward (a batch that is skipped, a loss that is only printed),
    the backward of the next forward reduces nothing.
    """
    for module in modules:
        flat: Any = module._handle and module._handle.flat_param
        if flat is None or flat.grad is None:
            continue
        # Reduced gradients have the dtype of the shard, but for `keep_low_precision_grads`: not told apart.
        if flat.grad.dtype != flat._local_shard.dtype and not module._handle._keep_low_precision_grads:  # type: ignore[union-attr]
            raise AccelError(
                "fsdp_version 1 with mixed precision has not reduced the gradients of the last backward, as a"
                " forward before it had a graph and no backward\n"
                "run forwards without a backward under torch.no_grad(), or set fsdp.fsdp_version: 2"
            )
