"""The exceptions that users see.

* AccelError
  + ConfigError: a setting is unknown, malformed, or contradicts another one.
  + PluginError: a plugin cannot be found or loaded, or breaks the contract.
  + LaunchError: workers could not be started, or ended badly.
  + CheckpointError: a checkpoint cannot be written, trusted, or restored.
  + CollectiveError: ranks disagree about a collective.

Each message names the value that was asked for, the mistake, and, on its last line, the remedy.
The facts are attributes too, so that programs need not parse text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = [
    "AccelError",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "LaunchError",
    "PluginError",
    "module_that_raised",
    "uncaught_error",
]


class AccelError(Exception):
    """Base of every error that accel-core raises on purpose."""


class ConfigError(AccelError):
    """A setting is unknown, malformed, or contradicts another one.

    Attributes:
        problems: a line for each problem (never only for the first).
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class PluginError(AccelError):
    """A plugin cannot be found or loaded, or breaks the contract.

    Attributes:
        plugin: name of the plugin, if known.
        hook: name of the hook concerned, if any.
        distribution: name and version of the distribution that ships the plugin.
    """

    def __init__(
        self,
        message: str,
        *,
        plugin: str | None = None,
        hook: str | None = None,
        distribution: str | None = None,
    ) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.hook = hook
        self.distribution = distribution


class LaunchError(AccelError):
    """Workers could not be started, or ended badly.

    Attributes:
        exit_code: exit code of `accel launch` for this error.
        rank: the first failing rank, if known.
    """

    def __init__(self, message: str, *, exit_code: int = 1, rank: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank


class CheckpointError(AccelError):
    """A checkpoint cannot be written, trusted, or restored.

    Attributes:
        path: the checkpoint concerned, or a file in it.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class CollectiveError(AccelError):
    """Ranks disagree about a collective: its kind, structure, shapes or dtypes.

    Attributes:
        operation: the collective that was called.
        found: for each rank, in rank order, a description of its call.
        failed_rank: the rank whose own error is reported here, if any.
    """

    def __init__(
        self, message: str, *, operation: str, found: Sequence[str] = (), failed_rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.found = tuple(found)
        self.failed_rank = failed_rank


def module_that_raised(error: BaseException) -> str:
    """Return the module whose code raised an error; "" if the error was never raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def uncaught_error() -> BaseException | None:
    """Return the error that ends this process, if any; None at a prompt of Python or IPython.

    An error at a prompt ends only the input, and Python remembers it in `sys.last_value`.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
