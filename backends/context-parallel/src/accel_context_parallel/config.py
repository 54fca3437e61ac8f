"""The options of section `cp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["ContextParallelPlugin"]


def _names(value: Mapping[str, int]) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        return value  # the option's type says what is wrong with it
    return {str(name): dim for name, dim in value.items()}


def _usual() -> dict[str, int]:
    tokens = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids", "attention_mask")
    return dict.fromkeys(tokens, 1)


@frozen(kw_only=True)
class ContextParallelPlugin(KwargsHandler):
    """Options of splitting sequences over ranks. Section `cp`."""

    buffers: Mapping[str, int] = option(
        factory=_usual,
        converter=_names,
        help="Entry of a batch -> its sequence dimension; entries of tuples are called 0, 1, ...",
    )
    derive: bool = option(
        True,
        help="Give batches with input_ids the position_ids they lack, those with labels their shift_labels,"
        " and refuse models that take no positions.",
    )
    rotate_method: Literal["allgather", "alltoall"] = option(
        "allgather",
        help="How keys and values reach all ranks. allgather: all at once; alltoall: one rank's part at a"
        " time, which takes less memory, for causal attention on CUDA devices.",
    )
