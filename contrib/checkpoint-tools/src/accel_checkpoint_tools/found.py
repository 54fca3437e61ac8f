"""Places of the tensors in a checkpoint, for commands that leave some of them out, or find none to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from accel_core import CheckpointError

__all__ = ["nothing_written", "of_program"]

Key = tuple[str, str]
_LISTED = 8


def nothing_written(what: str, lacking: str, keys: Iterable[Key], remedy: str) -> CheckpointError:
    """Return the error for a checkpoint, or a part of it, that lacks all that was to be written.

    It lists the prefixes of the keys that are there. remedy: what to do, with {prefix} for the prefix of most
    tensors.
    """
    prefixes = Counter(key.rpartition("/")[0] or key for unit, key in keys if unit).most_common()
    if not prefixes:
        return CheckpointError(
            f"{what} has no {lacking}, and nothing was written: it has no tensors\n"
            "give a checkpoint with the state of a model"
        )
    listed = [f"{prefix} ({count} tensor{'s' * (count > 1)})" for prefix, count in prefixes[:_LISTED]]
    more = f" and {len(prefixes) - _LISTED} more prefixes" if len(prefixes) > _LISTED else ""
    return CheckpointError(
        f"{what} has no {lacking}, and nothing was written\n"
        f"it has tensors under {', '.join(listed)}{more}\n{remedy.format(prefix=prefixes[0][0])}"
    )


def of_program(keys: Iterable[Key], values: int = 0) -> list[str]:
    """Name the tensors of a program without an Accelerator that are not weights; values: how many it has."""
    tensors = sum(key.startswith("values/") for unit, key in keys if unit)
    also = f" and {values} other value(s)" if values else ""
    return [f"{tensors} tensor(s){also} under values/"] if tensors or values else []
