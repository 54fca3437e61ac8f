"""Options of section `hpu`. Unset options keep the value of Gaudi's software or of the user's script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["HpuConfig"]


def _lengths(value: Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, str):  # a string is a sequence too
        raise TypeError(f"expected a list, got {value!r}")
    return tuple(sorted({int(length) for length in value}))


def _default_padding() -> dict[str, float]:
    return {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "labels": -100}


@frozen(kw_only=True)
class HpuConfig(KwargsHandler):
    """Options of the HPU of this process. Section `hpu`."""

    lazy: bool | None = option(
        None, help="Record operations and compile them as graphs (true), or run each at once (false)."
    )
    graphs: bool = option(
        False, help="Replay a model's recorded forward and backward; needs lazy mode and few batch shapes."
    )
    buckets: Sequence[int] = option(
        factory=tuple,
        converter=_lengths,
        help="Lengths to which batches are padded; a graph is compiled once for each length.",
    )
    padding: Mapping[str, float] = option(
        factory=_default_padding,
        help="Entry of a batch that is padded in dimension 1 -> the value; entries of tuples are 0, 1, ...",
    )
