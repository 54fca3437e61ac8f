"""Loggers and progress bars that know the rank."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import accel_core
from accel_compat.state.states import PartialState


class MultiProcessAdapter(accel_core.MultiProcessAdapter):
    """A logger whose methods also take `main_process_only` and `in_order`.

    Their defaults are True and False.
    """

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Prefix the message with its rank, and log the caller's line."""
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, on the main process or in order of ranks.

        Raises:
            RuntimeError: there is no state yet; to make one here would settle the device and the group.
        """
        if not PartialState._shared_state:
            raise RuntimeError(
                "You must initialize the accelerate state by calling either `PartialState()` or"
                " `Accelerator()` before using the logging utility."
            )
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        state = PartialState()
        text, more = self.process(msg, kwargs)
        for rank in range(state.num_processes) if in_order else (0 if main_only else state.process_index,):
            if rank == state.process_index and self.isEnabledFor(level):
                self.logger.log(level, text, *args, **more)
            if in_order:
                state.wait_for_everyone()


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that speaks on the main process, unless told otherwise."""
    logger, level = logging.getLogger(name), log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a bar of `tqdm.auto.tqdm`.

    With `main_process_only` it is shown by the first process of each node only.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ValueError(
            "Passing `True` or `False` as the first argument to Accelerate's `tqdm` wrapper is unsupported."
            " Please use the `main_process_only` keyword argument instead."
        )
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = PartialState().local_process_index != 0
    return bar(*args, **kwargs, disable=disable)
