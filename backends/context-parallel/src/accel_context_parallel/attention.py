"""Attention over whole sequences, from each rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from accel_context_parallel.sequence import Rows, causal_mask
from accel_core import AccelError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RING_DEVICES", "Rings", "Sequences", "install", "running", "running_in"]

RING_DEVICES: Final = frozenset({"cuda"})
"""Devices for which torch's ring attention has kernels. On other devices ranks gather keys and values."""

_attend = functional.scaled_dot_product_attention
_running: Sequences | None = None
"""The sequences of the step that runs. All threads see them: autograd computes checkpoints in its own."""


class Rings:
    """torch's ring attention, for one run.

    torch's public way replaces `scaled_dot_product_attention` while a context lasts, and keeps a reference to
    each replacement. So the context is entered once per run, and its replacement called by name.
    """

    def __init__(self, mesh: DeviceMesh, rotate_method: str) -> None:
        # The function is documented with `context_parallel`, but torch exports it from a private module only.
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(rotate_method)
        self._context = ExitStack()
        # torch reads the length of a buffer to decide that work can be balanced.
        unused = torch.empty(2 * mesh.size(), device=mesh.device_type)
        installed = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = _attend
        try:
            options: Any = {"buffers": [unused], "buffer_seq_dims": [0], "no_restore_buffers": {unused}}
            self._context.enter_context(context_parallel(mesh, **options))
            self.attend: Callable[..., Tensor] = functional.scaled_dot_product_attention
        finally:
            functional.scaled_dot_product_attention = installed

    def close(self) -> None:
        """Let DTensors attend as before."""
        self._context.close()


class Sequences:
    """The sequences of a step, of which each rank of `mesh` has a part.

    Args:
        mesh: the ranks that share the sequences.
        length: the length of whole sequences.
        rings: torch's ring attention, for causal attention without a mask; None: gather keys and values.
        only_rings: refuse attention that the rings do not serve.
    """

    def __init__(
        self, mesh: DeviceMesh, length: int, rings: Rings | None = None, *, only_rings: bool = False
    ) -> None:
        self.mesh, self.length, self.rings, self.only_rings = mesh, length, rings, only_rings
        self.rows = Rows()
        """The rows of the forward that runs, from which models of transformers get their masks."""
        self.attended = False
        """Some layer of this rank has attended."""

    def attend(
        self,
        query: Tensor,  # (..., heads, S / ranks, width)
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,  # (..., S / ranks, S), the parts of its columns rank by rank
        dropout_p: float,
        is_causal: bool,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Tensor:
        """Return the attention of this rank's queries to the keys and values of all ranks. Collective."""
        self.attended = True
        self._refuse(query, key, mask, is_causal)
        if self.rings is not None and is_causal and mask is None:
            return self.rings.attend(
                query, key, value, None, dropout_p, is_causal, enable_gqa=enable_gqa, **options
            )
        if self.only_rings:
            raise AccelError(
                "cp.rotate_method is alltoall, which serves causal attention without masks only: no packed"
                " rows, padding, windows or attention in both directions\nset cp.rotate_method: allgather"
            )
        keys, values = (_whole(each, self.mesh) for each in (key, value))
        if is_causal and mask is None:
            mask = causal_mask(self.length, self.mesh.size(), self.mesh.get_local_rank(), query.device)
        if mask is not None and enable_gqa:
            # Kernels with a mask take equal numbers of heads; torch would fall back to one without a kernel.
            groups, enable_gqa = query.shape[-3] // keys.shape[-3], False
            keys, values = (each.repeat_interleave(groups, -3) for each in (keys, values))
        return _attend(query, keys, values, mask, dropout_p, enable_gqa=enable_gqa, **options)

    def _refuse(self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> None:
        whole = key.shape[-2] * self.mesh.size()
        found = ""
        if whole != self.length or (is_causal and query.shape[-2] != key.shape[-2]):
            found = f"{query.shape[-2]} queries and {key.shape[-2]} keys per rank"
        elif mask is not None and mask.shape[-1] != whole:
            found = f"a mask for {mask.shape[-1]} tokens"
        if found:
            raise AccelError(
                f"cp: attention with {found}; {self.mesh.size()} ranks share sequences of {self.length}\n"
                "give the model the batch as the loader gave it, without a cache of earlier tokens"
            )


def _whole(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """(..., S / ranks, width) -> (..., S, width), rank by rank. Backward sums gradients over the ranks."""
    shared = DTensor.from_local(part.contiguous(), mesh, [Shard(part.dim() - 2)], run_check=False)
    return shared.full_tensor(grad_placements=[Partial()])


def running() -> Sequences | None:
    """Return the sequences of the step that runs; None outside of steps."""
    return _running


@contextmanager
def running_in(sequences: Sequences) -> Iterator[None]:
    """Let attention inside see whole sequences."""
    global _running  # noqa: PLW0603 (threads of autograd read it, so that it is no context variable)
    before, _running = _running, sequences
    try:
        yield
    finally:
        _running = before


def install() -> None:
    """Let calls of `torch.nn.functional.scaled_dot_product_attention` see whole sequences in steps."""
    attention: Any = scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attend as torch does, and in steps to whole sequences."""
    sequences = _running
    if sequences is None:
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None:
        raise AccelError(
            "cp: attention with a mask that the model has made of this rank's part of each sequence\nlet the"
            " model call scaled_dot_product_attention(..., is_causal=True), or use a model of transformers,"
            " whose masks cp makes"
        )
    return sequences.attend(query, key, value, None, dropout_p, is_causal, **options)
