"""Save ids, which name the process that writes, so that others see if it lives."""

from __future__ import annotations

import os
import platform
import secrets
from pathlib import Path
from typing import Final

from attrs import frozen
from xxhash import xxh3_64_hexdigest

SAVE_ID: Final = r"[0-9a-f]{16}-[0-9a-f]{8}-\d+-\d+-[0-9a-f]{8}"
"""Pattern of a save's id, which tells the process that writes the save.

Its parts: a digest of the run's id, then machine, number and start of the process, and random digits.
"""
_UNKNOWN: Final = "0"
_being_written: Final[set[str]] = set()
"""The saves that this process has begun and not ended."""
_kept: Final[set[str]] = set()
"""Saves that were given up or interrupted. Their last request may be done yet."""


@frozen
class Writer:
    """A process, for as long as its number means the same.

    machine: a digest of host, boot and process namespace. started: in the kernel's ticks.
    """

    machine: str
    process: int
    started: str

    @classmethod
    def here(cls) -> Writer:
        """Return this process."""
        return cls(_machine(), os.getpid(), _started(os.getpid()))

    @classmethod
    def of(cls, save_id: str) -> Writer:
        """Return the process that has made a save id."""
        _, machine, process, started, _ = save_id.split("-")
        return cls(machine, int(process), started)

    def is_dead(self) -> bool:
        """Return True if the process has ended. Call it on that process's machine.

        Numbers are given anew.
        """
        return _has_ended(self.process) or _started(self.process) not in (self.started, _UNKNOWN)


def new_save_id(run_id: str) -> str:
    """Return an id for one save by this process."""
    run, here = xxh3_64_hexdigest(run_id.encode("utf-8", "surrogateescape")), Writer.here()
    return f"{run}-{here.machine}-{here.process}-{here.started}-{secrets.token_hex(4)}"


def begin_writing(save_id: str) -> None:
    """Note that this process writes the save, until `end_writing`."""
    _being_written.add(save_id)


def end_writing(save_id: str) -> None:
    """Note that this process writes the save no more.

    Its leftovers may be removed from now on.
    """
    _being_written.discard(save_id)


def keep_writing(save_id: str) -> None:
    """Note that a save is never over for as long as this process lives."""
    _kept.add(save_id)


def is_over(save_id: str) -> bool:
    """Return True if certainly no process writes the save any more.

    A run's id says nothing: two jobs may have one.
    """
    writer, here = Writer.of(save_id), Writer.here()
    if writer.machine != here.machine:
        return False  # nothing is known of processes there
    return save_id not in _being_written | _kept if writer == here else writer.is_dead()


def is_of_another_machine(save_id: str) -> bool:
    """Return True if no process of this machine can tell whether the save is over."""
    return Writer.of(save_id).machine != _machine()


def _machine() -> str:
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    found = [
        platform.node(),
        boot.read_text() if boot.exists() else "",
        space.exists() and space.stat().st_ino,
    ]
    return xxh3_64_hexdigest(repr(found).encode())[:8]


def _started(process: int) -> str:
    """When the process was started; "" of one that has ended and is not yet reaped."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return _UNKNOWN
    return "" if state in "ZX" else fields[18]


def _has_ended(process: int) -> bool:
    if os.name == "nt":  # asking there would end it
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, which is alive
        return False
    return False
