"""Progress of long operations: live on a terminal, a line per minute in a log."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

from accel_core.contract.world import rank_here
from accel_core.distributed.stderr import is_terminal, tell

T = TypeVar("T")

SHOW_AFTER: Final = 1.0
"""Seconds from the start to the first line on a terminal."""
SHOW_EVERY: Final = 0.5
"""Seconds between two lines on a terminal."""
TELL_EVERY: Final = 60.0
"""Seconds between two lines of a log."""
BAR: Final = 20
"""Length of a bar, in characters."""

_open: Final[list[object]] = []
"""Operations under way, outermost first; only the innermost operation is shown."""


def progress(items: Iterable[T], description: str = "", *, total: float | None = None) -> Iterable[T]:
    """Return an iterable over `items` that shows a bar on the terminal of the main process.

    On other ranks, and without a terminal, `items` is returned as it is.

    Args:
        items: an iterable.
        description: text before the bar.
        total: number of items, if `items` has no length.
    """
    if rank_here() != 0 or not is_terminal():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, description, total, console=Console(stderr=True))


@contextmanager
def show_progress(
    text: str | Callable[[], str],
    measure: Callable[[], tuple[int, int]] | None = None,
    *,
    main_process_only: bool = True,
    tell_after: float | None = None,
) -> Iterator[None]:
    """Show the progress of the context on stderr, if it takes more than a second.

    A terminal shows one line that changes, and is wiped at the end; a log gets a line per minute.

    Args:
        text: name of the operation, such as "loading step-100", or a function that returns it.
        measure: returns the bytes that are done and the total, 0 if the total is not known. Called from
            another thread before a line is shown.
        main_process_only: False shows lines on each rank.
        tell_after: seconds to the first line if there is no terminal. Default: a minute.
    """
    if main_process_only and rank_here() != 0:
        yield
        return
    over, begun, work = threading.Event(), time.monotonic(), object()
    on_terminal = is_terminal()

    def show() -> None:
        first = TELL_EVERY if tell_after is None else tell_after
        pause, drawn = SHOW_AFTER if on_terminal else first, ""
        while not over.wait(pause):
            pause = SHOW_EVERY if on_terminal else TELL_EVERY
            if _open[-1] is work:
                drawn = _line(text if isinstance(text, str) else text(), measure, time.monotonic() - begun)
                _write(drawn, on_terminal=on_terminal)
        if drawn and on_terminal:
            _write("", on_terminal=True)

    thread = threading.Thread(target=show, name="accel-progress", daemon=True)
    _open.append(work)
    try:
        with suppress(RuntimeError):  # Python ends, and starts no more threads
            thread.start()
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
        _open.remove(work)


def _line(text: str, measure: Callable[[], tuple[int, int]] | None, seconds: float) -> str:
    """Return "accel: TEXT: [###---] 512 of 2048 MiB, 12 s", without the parts that are not known."""
    done, total = measure() if measure is not None else (0, 0)
    bar = min(BAR, BAR * done // total) if total else 0
    counted = f" [{'#' * bar:-<{BAR}}] {done >> 20} of {total >> 20} MiB" if total else ""
    if done and not total:
        counted = f" {done >> 20} MiB"
    return f"accel: {text}:{counted}{',' if counted else ''} {seconds:.0f} s"


def _write(line: str, *, on_terminal: bool) -> None:
    width = max(2, shutil.get_terminal_size().columns) - 1
    tell(f"\r{line[:width]:<{width}}" + ("\r" * (not line)) if on_terminal else f"{line}\n")
