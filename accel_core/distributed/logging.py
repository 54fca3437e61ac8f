"""Loggers that know their rank, with or without an Accelerator."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from accel_core.contract.run import live
from accel_core.contract.world import rank_here

_warned: set[tuple[object, ...]] = set()

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """Return the logger `name`, which logs on the main process by default.

    Args:
        name: as for `logging.getLogger`.
        log_level: the lowest level that is logged. Default: ACCEL_LOG_LEVEL or ACCELERATE_LOG_LEVEL of the
            environment, else the level that `logging` has.

    Raises:
        ValueError: the level does not exist.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCEL_LOG_LEVEL") or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
        if logging.lastResort:  # prints in a program without handlers, by default warnings only
            logging.lastResort.setLevel(min(logging.lastResort.level, logger.level))
    return MultiProcessAdapter(logger, {})


class MultiProcessAdapter(_Adapter):
    """Logger with the options `main_process_only` (True) and `in_order` (False).

    main_process_only=False logs on every rank. in_order=True logs on every rank, one rank after the other:
    collective, also for ranks whose level is higher. Before there is an Accelerator, in_order has no order.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log on the ranks that the options select. See `logging.Logger.log`."""
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        own, runs = rank_here(), live()[:1] if in_order else []
        size = runs[0].world.size if runs else 1
        for rank in range(size) if runs else (0 if main_only and not in_order else own,):
            if rank == own and self.isEnabledFor(level):
                more = {**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1}  # the caller's line
                text = f"[RANK {rank}] {msg}"
                self.logger.log(level, text, *args, **more)
                if level >= logging.WARNING:
                    _tell_observers(str(msg), args)
            for run in runs:
                from accel_core.distributed.exchange import collective_call  # late: it imports torch

                with collective_call(run, "world", "log in order", None, objects=True) as call:
                    call.all_objects(None)

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning once per process for the same message and arguments."""
        key = self.logger.name, str(msg), str(args)
        if key not in _warned:
            _warned.add(key)
            self.warning(msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def _tell_observers(msg: str, args: tuple[object, ...]) -> None:
    for run in live():
        run.hooks.noted("warning", msg % args if args else msg)
