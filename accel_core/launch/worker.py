"""Run the user's script in a worker, and note its failure for the launcher.

`command(["train.py", "--lr", "1"])` behaves like `python train.py --lr 1`, and words that begin with `-m`
like `python -m`. An uncaught exception goes into the file that torch's agent names, not to the terminal:
the launcher prints the traceback of one rank, once. Imports the standard library only, since every worker
waits for the imports.
"""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import TypeVar

R = TypeVar("R")
NOTE = "TORCHELASTIC_ERROR_FILE"
LOGGED = "ACCEL_WORKER_LOGGED"
"""Variable of a worker whose output, traceback included, goes to a file."""
PACKAGE = str(Path(__file__).parents[1]) + os.sep
OURS = (PACKAGE, runpy.__file__, "<frozen runpy>")
PR_SET_PDEATHSIG = 1
WARNING = "SIGUSR1"
"""Signal by which schedulers warn that a job's time ends soon."""
BOOT = "import sys; sys.path[0] or sys.path.pop(0); from accel_core.launch.worker import main; main()"
"""Program of a worker.

Not `-m accel_core.launch.worker`: a json.py of the current folder would replace the standard library's.
"""


def command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a worker that runs a script, or `-m` a module."""
    return (sys.executable, "-u", "-c", BOOT, *words)


def main() -> None:
    """Run the script or module of the command line as `__main__`."""
    die_with_parent()
    faulthandler.enable()
    if hasattr(signal, WARNING):  # schedulers warn all processes; the launcher sends a SIGTERM instead
        signal.signal(getattr(signal, WARNING), signal.SIG_IGN)
    note_process()
    keep_lines_whole()
    module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2 if module else 1 :]
    if module:
        _first_on_path(str(Path.cwd()))
        guard(lambda: _run_module(sys.argv[0]))
    else:
        guard(lambda: _run_script(sys.argv[0]))


def note_process() -> None:
    """Write this process's ID to a file for the launcher, which sends signals to it."""
    if NOTE in os.environ:
        with suppress(OSError):  # the disk is full
            process_file(os.environ[NOTE]).write_text(str(os.getpid()), encoding="ascii")


def process_file(note: str) -> Path:
    """Return the file for a worker's process ID, beside its note."""
    return Path(note).with_name("process")


def guard(call: Callable[[], R]) -> R:
    """Return `call()`; note a failure in the agent's file, and exit with its code."""
    try:
        return call()
    except SystemExit as error:
        if isinstance(error.code, int):
            if error.code & 0xFF:  # the system keeps 8 bits
                _note(f"exit code {error.code}", "", error.code)
        elif error.code is not None:
            _note("exit code 1", "")
        raise
    except KeyboardInterrupt as error:
        _note("KeyboardInterrupt", _render(error), 128 + signal.SIGINT)
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:  # noted, not swallowed: the process ends here
        sys.last_value = error  # as the interpreter does: exit handlers recognize a failure by it
        vars(sys).pop("ps1", None)  # inherited from a forked notebook, but no prompt follows here
        text = _render(error)
        failed_rank = getattr(error, "failed_rank", None)
        if not _note(f"{type(error).__name__}: {error}", text, of=failed_rank) or LOGGED in os.environ:
            sys.stderr.write(text)
        _tell_others(error)
        sys.exit(1)


def _tell_others(error: BaseException) -> None:
    """Call an excepthook that the script has set, such as a tracker's.

    torch's excepthook is skipped, since it would print the traceback a second time.
    """
    hook = sys.excepthook
    if hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith("torch"):
        hook(type(error), error, error.__traceback__)


def die_with_parent() -> None:
    """Have the kernel kill this process when the launcher ends, even by SIGKILL. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def keep_lines_whole() -> None:
    """Write unbuffered output line by line, if there are several workers.

    Workers share one stream, and `print` writes the text and its newline separately.
    """
    if getattr(sys.stdout, "write_through", False) and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]


def _run_module(name: str) -> None:
    names = runpy.run_module(name, run_name="__main__", alter_sys=True)
    sys.modules["__main__"].__dict__.update(names)  # for threads and handlers at exit, as python -m


def _run_script(path: str) -> None:
    # A module of its own stays in sys.modules, so that spawned DataLoader workers, pickle and
    # handlers at exit find `__main__`; runpy.run_path would take it away again.
    main_module = ModuleType("__main__")
    full = Path(path).absolute()
    loader = SourceFileLoader("__main__", str(full))
    main_module.__dict__.update(
        __file__=str(full), __builtins__=builtins, __spec__=None, __loader__=loader, __cached__=None
    )
    main_module.__annotations__ = {}
    sys.modules["__main__"] = main_module
    _first_on_path(str(Path(os.path.realpath(full)).parent))  # links resolved, as python does
    code = compile(full.read_bytes(), str(full), "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102  # what `python script.py` does


def _first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _render(error: BaseException) -> str:
    story = traceback.TracebackException.from_exception(error)
    # The first frames are this package's and runpy's; the user's story starts after them.
    frames = list(dropwhile(lambda frame: frame.filename.startswith(OURS), story.stack))
    if type(error).__module__ == "accel_core.errors":
        # The message is complete: neither accel-core's frames nor the error that it caught would help.
        frames = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
        story.__cause__, story.__suppress_context__ = None, True
    story.stack = traceback.StackSummary.from_list(frames)
    return "".join(story.format())


def _note(message: str, trace: str, code: int = 1, of: int | None = None) -> bool:
    # torch's format, plus a time with fractions, since ranks fail milliseconds apart, the exit code, since a
    # library may still abort the process on its way out, and the rank whose error is reported.
    path = os.environ.get(NOTE)
    if not path:
        return False
    now = time.time()
    extra = {"py_callstack": trace, "timestamp": str(int(now)), "time": now, "code": code, "of": of}
    note = {"message": {"message": message, "extraInfo": extra}}
    try:
        beside = Path(f"{path}.part")  # this process may be killed while it writes
        beside.write_text(json.dumps(note), encoding="utf-8")
        beside.replace(path)
    except OSError:  # the disk is full, or the script has emptied the folder of temporary files
        return False
    return True


if __name__ == "__main__":
    main()
