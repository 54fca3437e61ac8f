"""Loggers that know the rank."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import accel_core
from accel_compat.refusing import unserved

from .state import PartialState

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(accel_core.MultiProcessAdapter):
    """A logger whose methods also take `main_process_only` (True) and `in_order` (False)."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message with its rank; the line that is named is the caller's, or as `stacklevel` says."""
        kwargs.setdefault("stacklevel", 2)
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """As `logging.Logger.log`."""
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        state = PartialState()
        text, more = self.process(msg, kwargs)
        for rank in range(state.num_processes) if in_order else (0 if main_only else state.process_index,):
            if rank == state.process_index and self.isEnabledFor(level):
                self.logger.log(level, text, *args, **more)
            if in_order:
                state.wait_for_everyone()


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """A logger whose calls speak on the main process only, unless told otherwise."""
    logger, level = logging.getLogger(name), log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


__getattr__ = unserved(__name__)
