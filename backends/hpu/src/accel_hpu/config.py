"""The options of section `hpu`.

What is unset stays as Gaudi's software, or the user, has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["HpuConfig"]


def _lengths(value: Sequence[int]) -> tuple[int, ...]:
    if isinstance(value, str):  # its letters are not lengths
        raise TypeError(f"expected a list, got {value!r}")
    return tuple(sorted({int(length) for length in value}))


def _usual() -> dict[str, float]:
    return {"input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "labels": -100}


@frozen(kw_only=True)
class HpuConfig(KwargsHandler):
    """Options of the HPU of this process. Section `hpu`."""

    lazy: bool | None = option(
        None, help="Record operations and compile them in graphs (true), or run each at once (false)."
    )
    graphs: bool = option(
        False, help="Replay a model's recorded forward and backward; wants lazy mode and few batch shapes."
    )
    buckets: Sequence[int] = option(
        factory=tuple,
        converter=_lengths,
        help="Lengths to which batches are padded: each length is compiled once, others never.",
    )
    padding: Mapping[str, float] = option(
        factory=_usual,
        help="Entry of a batch that is padded, in dimension 1 -> with what; of tuples: 0, 1, ...",
    )
