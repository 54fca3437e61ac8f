"""Attention over the whole sequence, from a rank's part of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from accel_context_parallel.sequence import causal_mask
from accel_core import AccelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["attending"]

_GATHER = "all_gather_single_autograd"
_gather = getattr(collectives, _GATHER if hasattr(collectives, _GATHER) else "all_gather_tensor_autograd")
"""By the name it has from torch 2.13 on, or before."""
_attend = functional.scaled_dot_product_attention


@contextmanager
def attending(mesh: DeviceMesh, length: int, anyone: Callable[[bool], bool]) -> Iterator[None]:
    """Let attention inside see all `length` tokens, those of all ranks.

    It replaces `functional.scaled_dot_product_attention`.

    By torch's own rings; on the CPU, where these have no kernel, by gathering keys and values.
    anyone: says whether a rank that has a part of the same model called it, from whether this one did.

    Raises:
        AccelError: nobody called it, so that each rank took its part for all.
    """
    on_cpu = mesh.device_type == "cpu"
    with nullcontext() if on_cpu else _torchs_own(mesh, length):
        attention: Any = Gathered(mesh, length) if on_cpu else Counted(mesh.device_type)
        inner = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = attention  # as torch's own does
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = inner
    if not anyone(attention.called):
        raise AccelError(
            "cp: the model never called torch.nn.functional.scaled_dot_product_attention: it saw only this"
            " rank's part of each sequence\nlet its attention call it, by this name (transformers:"
            ' attn_implementation="sdpa"), or train without cp'
        )


@contextmanager
def _torchs_own(mesh: DeviceMesh, length: int) -> Iterator[None]:
    # Torch looks at the length of a buffer to see that work can be balanced.
    unused = torch.empty(length, device=mesh.device_type)
    replaced = None
    try:
        with context_parallel(mesh, buffers=[unused], buffer_seq_dims=[0], no_restore_buffers={unused}):
            replaced = functional.scaled_dot_product_attention
            yield
    finally:  # torch keeps each function that it has replaced: the list would grow with each step
        inspect.unwrap(context_parallel).__globals__.get("_replaced_functions", {}).pop(replaced, None)


class Counted:
    """Attends by torch's own rings, which balance causal attention only."""

    __name__ = "scaled_dot_product_attention"  # torch.compile asks functions of torch for theirs

    def __init__(self, device: str) -> None:
        self.device, self.called = device, False
        self.attend = functional.scaled_dot_product_attention

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        self.called = True
        if attn_mask is not None or not is_causal or query.shape[-2] != key.shape[-2]:
            raise AccelError(
                f"cp: attention that is not causal, or has a mask or keys of another length; torch's context"
                f" parallelism on {self.device} balances causal attention within sequences only\n"
                "call scaled_dot_product_attention(..., is_causal=True), or train without cp"
            )
        return self.attend(query, key, value, None, dropout_p, is_causal, **options)


class Gathered:
    """Attends from a rank's queries to the keys and values of all ranks."""

    __name__ = "scaled_dot_product_attention"  # torch.compile asks functions of torch for theirs

    def __init__(self, mesh: DeviceMesh, length: int) -> None:
        self.mesh, self.length, self.called = mesh, length, False

    def __call__(
        self,
        query: Tensor,  # (..., heads, S / ranks, width)
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        self.called = True
        whole = key.shape[-2] * self.mesh.size()
        if attn_mask is not None or whole != self.length:
            found = "a mask" if attn_mask is not None else f"{key.shape[-2]} tokens a rank"
            raise AccelError(
                f"cp: attention with {found}; {self.mesh.size()} ranks share sequences of {self.length}\n"
                "give the model the batch as the loader gave it; its attention may be causal or without mask"
            )
        keys, values = (_gather(each.contiguous(), each.dim() - 2, self.mesh) for each in (key, value))
        mask = None
        if is_causal:
            mask = causal_mask(whole, self.mesh.size(), self.mesh.get_local_rank(), query.device)
        return _attend(query, keys, values, mask, dropout_p, **options)
