"""`tqdm` that shows on one process only."""

from __future__ import annotations

from typing import Any


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """`tqdm.auto.tqdm`; with `main_process_only` on the first process of each node only."""
    from tqdm.auto import tqdm as bar

    from ..state import PartialState

    if args and isinstance(args[0], bool):
        raise ValueError(
            "Passing `True` or `False` as the first argument to Accelerate's `tqdm` wrapper is"
            " unsupported. Please"
            " use the `main_process_only` keyword argument instead."
        )
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = PartialState().local_process_index != 0
    return bar(*args, **kwargs, disable=disable)
