"""Models of transformers: an attention implementation whose masks are of whole sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from accel_context_parallel.attention import running
from accel_context_parallel.sequence import positions
from accel_core import AccelError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["attend_by_cp", "pretrained", "refused"]

NAME: Final = "context_parallel"
"""The name of the implementation in transformers' registries."""
UNSERVED: Final = ("softcap", "position_bias", "s_aux", "output_attentions", "cache")
"""Arguments of attention functions that change the result, and that `scaled_dot_product_attention` lacks."""


def pretrained(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost models of transformers in a module."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from pretrained(child)


def refused(model: Any) -> Iterator[str]:
    """Yield reasons why a model of transformers cannot attend by `cp`."""
    name, config = type(model).__name__, model.config.get_text_config()
    own = model.config._attn_implementation
    if own not in {"sdpa", NAME, None}:
        yield (
            f"cp: {name} attends by {own!r}, which sees this rank's part of each sequence only\nload the"
            ' model with attn_implementation="sdpa"'
        )
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False):  # transformers' mark of models that have no layer types
        kinds.add("a recurrent state")
    if kinds:
        yield (
            f"cp: {name} has layers of {', '.join(sorted(kinds))}, which would run on this rank's part of"
            " each sequence as if it were whole\nuse a model of full or sliding attention, or train without"
            " cp"
        )


def attend_by_cp(model: Any) -> None:
    """Let a model of transformers attend by `cp`; outside of steps it attends by "sdpa"."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' `AttentionInterface`."""
    sequences = running()
    if sequences is None:
        from transformers import AttentionInterface

        given = (module, query, key, value, attention_mask, dropout, scaling, is_causal)
        registry: Any = AttentionInterface
        attended: tuple[Tensor, None] = registry()["sdpa"](*given, **options)
        return attended
    for name in UNSERVED:
        if options.get(name) is not None and options[name] is not False:
            raise AccelError(
                f"cp: {type(module).__name__} attends with {name}, which torch's attention does not take\n"
                "use a model without it, or train without cp"
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    result = sequences.attend(
        query,
        key,
        value,
        attention_mask,
        dropout,
        is_causal and attention_mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
        scale=scaling,
    )
    return result.transpose(1, 2).contiguous(), None


def _mask(*given: Any, **options: Any) -> Tensor | None:
    """Mask function of transformers' `AttentionMaskInterface`.

    Returns:
        (B or 1, 1, S / ranks, S), with columns rank by rank; None if attention is causal, or sees all tokens.
    """
    from transformers import masking_utils

    sequences = running()
    if sequences is None:
        made: Tensor | None = masking_utils.sdpa_mask(*given, **options)
        return made
    is_bidirectional = "allow_is_bidirectional_skip" in options
    if not options["allow_is_bidirectional_skip" if is_bidirectional else "allow_is_causal_skip"]:
        raise AccelError(
            "cp: the model overlays its mask with blocks of its own, such as images that see themselves\n"
            "use a model with causal or sliding masks, or train without cp"
        )
    function, rows = options["mask_function"], sequences.rows
    if not is_bidirectional and (options.get("local_size") or 0) >= sequences.length:
        function = masking_utils.causal_mask_function  # the window holds whole sequences
    is_usual = function in {masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function}
    if is_usual and rows.documents is None and rows.kept is None:
        return None
    ranks, rank = sequences.mesh.size(), sequences.mesh.get_local_rank()
    where = positions(sequences.length, ranks, torch.device(options["device"]))
    mine, whole = where[rank], where.flatten()
    seen: Tensor = function(None, None, mine[:, None], whole)
    if rows.documents is not None:
        seen = seen & (rows.documents[:, mine][:, :, None] == rows.documents[:, whole][:, None, :])
    if rows.kept is not None:
        seen = seen & rows.kept[:, whole][:, None, :]
    return seen.expand(*seen.shape[:-2], len(mine), len(whole)).view(-1, 1, len(mine), len(whole))
