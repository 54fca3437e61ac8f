"""Progress: a bar around items, and what is under way, on the main process."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
import threading
import time

import pytest
import torch
from torch import nn

from accel_core import Accelerator, World, progress, show_progress
from accel_core.checkpoint import weight_files
from accel_core.distributed import progress as under_way
from accel_core.storage import pending
from accel_core.storage.files import DataFile
from accel_testing.patience import patience


def test_off_a_terminal_it_is_the_thing_itself(capsys):
    items = [1, 2]

    assert progress(items, "training") is items
    assert capsys.readouterr() == ("", "")


def everything_written_to(reader, into):
    with contextlib.suppress(OSError):  # EIO: the other end is closed, and all was read
        while piece := os.read(reader, 65536):
            into += piece


def draw():
    reader, writer = pty.openpty()
    shown = bytearray()
    watching = threading.Thread(target=everything_written_to, args=(reader, shown))
    watching.start()
    with os.fdopen(writer, "w") as sys.stderr:
        items = progress(iter("abc"), "training", total=3)
        untouched = type(items).__name__ == "list_iterator" or not hasattr(items, "gi_frame")
        seen = list(items)
    watching.join()
    assert untouched is (not shown)
    return seen, b"training" in shown, b"100%" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads a pseudo terminal as Linux has it")
def test_on_a_terminal_the_main_process_shows_one(run_processes):
    assert run_processes(draw) == [(["a", "b", "c"], True, True), (["a", "b", "c"], False, False)]


# -- work without steps ------------------------------------------------------------------------------


@contextlib.contextmanager
def terminal():
    """A pseudo terminal as stderr; yields what it has shown, complete afterwards."""
    reader, writer = pty.openpty()
    shown, before = bytearray(), sys.stderr
    watching = threading.Thread(target=everything_written_to, args=(reader, shown))
    watching.start()
    try:
        with os.fdopen(writer, "w") as sys.stderr:
            yield shown
    finally:
        sys.stderr = before
        watching.join()


def until(condition):
    deadline = time.monotonic() + patience(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def work():
    under_way.SHOW_AFTER = under_way.SHOW_EVERY = 0.01
    done = 0
    with terminal() as shown, show_progress("loading here", lambda: (done << 20, 4 << 20)):
        if World.here().rank == 0:
            until(lambda: b"0 of 4 MiB" in shown)
            done = 2
            until(lambda: b"2 of 4 MiB" in shown)
        else:
            time.sleep(0.1)
    return shown.decode()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads a pseudo terminal as Linux has it")


@LINUX
def test_a_terminal_of_the_main_process_shows_how_much_is_done_and_forgets_it(run_processes):
    first, second = run_processes(work)

    assert "\raccel: loading here: [##########----------] 2 of 4 MiB, 0 s" in first
    assert first.endswith(" \r")
    assert second == ""


@LINUX
@pytest.mark.parametrize("on_terminal", [True, False])
def test_nothing_is_said_of_what_takes_less_than_a_second(on_terminal, capsys):
    with terminal() if on_terminal else contextlib.nullcontext(b"") as shown, show_progress("loading"):
        time.sleep(0.1)

    assert bytes(shown) == b""
    assert capsys.readouterr().err == ""


def test_a_log_has_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(under_way, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(under_way, "TELL_EVERY", 0.3)
    with show_progress("loading here", lambda: (3 << 20, 4 << 20)):
        time.sleep(0.7)

    line = "accel: loading here: [###############-----] 3 of 4 MiB, "
    assert capsys.readouterr().err == f"{line}0 s\n{line}1 s\n"


def test_a_log_has_the_first_line_when_it_is_asked_for(monkeypatch, capsys):
    with show_progress(lambda: "waiting", tell_after=0.01):
        time.sleep(0.2)

    assert capsys.readouterr().err == "accel: waiting: 0 s\n"


def test_of_work_within_work_only_the_inner_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(under_way, "TELL_EVERY", 0.02)
    with show_progress("outer"), show_progress("inner", lambda: (5 << 20, 0)):
        time.sleep(0.3)

    assert {*capsys.readouterr().err.splitlines()} == {"accel: inner: 5 MiB, 0 s"}


def test_an_error_within_it_ends_it(monkeypatch, capsys):
    monkeypatch.setattr(under_way, "TELL_EVERY", 0.02)
    with pytest.raises(KeyError), show_progress("loading"):
        raise KeyError
    assert [one.name for one in threading.enumerate() if one.name == "accel-progress"] == []


def test_the_work_goes_on_where_nobody_reads_what_is_shown(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(under_way, "TELL_EVERY", 0.01)
    monkeypatch.setattr(sys, "stderr", Gone())
    with show_progress("loading"):
        time.sleep(0.1)


# -- where it is shown -------------------------------------------------------------------------------


class Slow(nn.Linear):
    """A layer whose parameters take a while to move."""

    def _apply(self, *arguments, **options):
        time.sleep(0.1)
        return super()._apply(*arguments, **options)

    def forward(self, x):
        return super().forward(x) * 1


def slow_compiler(graph, inputs):
    time.sleep(0.1)
    return graph.forward


def lines_of(capsys):
    text = capsys.readouterr().err
    return {line.rpartition(": ")[0] for line in text.splitlines() if line.startswith("accel: ")}


@pytest.fixture
def soon(monkeypatch):
    """Lines of a log come at once, and checkpoints are read and written slowly."""

    def late(function):
        def call(*arguments, **options):
            time.sleep(0.02)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(under_way, "TELL_EVERY", 0.01)
    monkeypatch.setattr(DataFile, "_read", late(DataFile._read))
    monkeypatch.setattr(pending, "write_file", late(pending.write_file))
    monkeypatch.setattr(weight_files, "write_whole", late(weight_files.write_whole))


def test_preparing_and_the_first_call_of_what_is_compiled_are_shown(soon, capsys):
    torch._dynamo.register_backend(slow_compiler, name="slow_compiler")
    accelerator = Accelerator(device="cpu", dynamo_backend="slow_compiler")
    model = accelerator.prepare(Slow(2, 1))
    assert lines_of(capsys) == {"accel: preparing Slow for single"}

    model(torch.ones(1, 2))
    assert lines_of(capsys) == {"accel: compiling Slow, in its first call"}

    model(torch.ones(1, 2))
    time.sleep(0.05)
    assert lines_of(capsys) == set()
    torch._dynamo.backends.registry._COMPILER_FNS.pop("slow_compiler")


def test_saving_and_loading_are_shown(soon, capsys, tmp_path):
    accelerator = Accelerator(device="cpu")
    model = accelerator.prepare(nn.Linear(2, 1))
    capsys.readouterr()

    accelerator.save_state(tmp_path / "here")
    assert lines_of(capsys) == {"accel: writing here"}
    accelerator.load_state(tmp_path / "here")
    assert lines_of(capsys) == {"accel: verifying here", "accel: loading here"}
    accelerator.save_model(model, tmp_path / "one")
    assert lines_of(capsys) == {f"accel: writing {tmp_path / 'one'}"}
    accelerator.end_training()


# -- nobody reads -----------------------------------------------------------------------------------


class OnlyWrites:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


class Closed(io.StringIO):
    def __init__(self):
        super().__init__()
        self.close()


@pytest.mark.parametrize("make", [lambda: None, Closed, OnlyWrites])
def test_a_run_needs_no_stderr(tmp_path, monkeypatch, make):
    monkeypatch.setattr(sys, "stderr", make())
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")

    with show_progress("waiting", tell_after=0.01):
        time.sleep(0.1)
    assert list(progress([1, 2])) == [1, 2]
    accelerator.end_training()
    assert model.weight.shape == (2, 2)
    if isinstance(sys.stderr, OnlyWrites):
        assert "accel: waiting: 0 s\n" in sys.stderr.text
