"""The exceptions users meet.

* AccelError
  + ConfigError: a setting is unknown, malformed, or contradicts another one.
  + PluginError: a plugin cannot be found, loaded, or breaks the contract.
  + LaunchError: workers could not be started, or ended badly.
  + CheckpointError: a checkpoint cannot be written, trusted, or restored.
  + CollectiveError: ranks disagree about a collective.

Each message says what was asked, what was found, and, on its last line, what to do.
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
        problems: every problem found, one rendered line each (never only the first).
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (message,)


class PluginError(AccelError):
    """A plugin cannot be found, loaded, or breaks the contract.

    Attributes:
        plugin: name of the plugin, where one is known.
        hook: name of the hook concerned, where there is one.
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
        exit_code: what `accel launch` exits with because of it.
        rank: the first failing rank, where one is known.
    """

    def __init__(self, message: str, *, exit_code: int = 1, rank: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank


class CheckpointError(AccelError):
    """A checkpoint cannot be written, trusted, or restored.

    Attributes:
        path: the checkpoint (or the file in it) concerned.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class CollectiveError(AccelError):
    """Ranks disagree about a collective: its kind, structure, shapes or dtypes.

    Attributes:
        operation: the collective that was called.
        found: what each rank brought, by rank.
        failed_rank: the rank whose own error is reported here, where there is one.
    """

    def __init__(
        self, message: str, *, operation: str, found: Sequence[str] = (), failed_rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.found = tuple(found)
        self.failed_rank = failed_rank


def module_that_raised(error: BaseException) -> str:
    """Return the module whose code raised an error; "" if it was never raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def uncaught_error() -> BaseException | None:
    """Return the error that ends this process, if one does.

    At a prompt, Python's or IPython's, an error ends what was typed, and the prompt remembers it.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
