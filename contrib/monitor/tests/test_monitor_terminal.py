"""On a terminal the record is a summary, or one screen that follows the run."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from accel_monitor.records import Record
from accel_monitor.terminal import losses, summary
from accel_monitor.watching import Newest, frame, line
from accel_testing.patience import patience

ACCEL = [sys.executable, "-m", "accel_core"]


def accel(run_command, *words):
    done = run_command([*ACCEL, *map(str, words)], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_summary_fits_80_columns_and_has_the_curves(resumed, run_command):
    code, output, errors = accel(run_command, "report", resumed[0])

    assert (code, errors) == (0, "")
    assert max(map(len, output.splitlines())) <= 80
    for text in (
        "loss: ",
        "learning rate",
        "step time",
        "samples/s",
        "tokens/s",
        "backward",
        "checkpoint of step 10",
        "ten are done",
    ):
        assert text in output
    assert any("\u2801" <= character <= "\u28ff" for character in output)
    assert output.index("loss: ") < output.index("step time") < output.index("memory: ")
    assert "went on from step 10" in output


@pytest.mark.needs("accel-ddp")
def test_ranks_are_shown_with_their_memory(resumed, run_command):
    for words in (("report", resumed[0]), ("watch", resumed[0], "--once")):
        _, output, _ = accel(run_command, *words)
        (head,) = [at for at, row in enumerate(output.splitlines()) if row.startswith("rank  host")]
        ranks = [row.split()[0] for row in output.splitlines()[head + 1 : head + 3]]
        assert sorted(ranks) == ["0", "1"]
        assert "MiB" in output.splitlines()[head + 1]


def test_several_runs_are_compared(resumed, whole, run_command):
    code, output, _ = accel(run_command, "report", resumed[0], whole[0])

    assert code == 0
    assert "differences of settings" in output
    assert [row.split()[1:] for row in output.splitlines() if row.startswith("settings.lr")] == [
        ["0.1", "0.05"]
    ]


def test_a_folder_without_a_record_is_an_error_with_a_remedy(tmp_path, run_command):
    code, _, errors = accel(run_command, "report", tmp_path)

    assert code == 1
    assert "no record of a run is there" in errors
    assert errors.splitlines()[-1].startswith("give the project_dir")


@pytest.mark.parametrize("once", [["--once"], []])
def test_a_file_that_is_no_record_is_not_waited_for(tmp_path, once, run_command):
    (tmp_path / "log.jsonl").write_text('{"loss": 1}\n')

    code, output, errors = accel(run_command, "watch", tmp_path / "log.jsonl", *once)

    assert (code, output) == (1, "")
    assert "log.jsonl is not a record of a run: it has no line of kind 'run'\ngive the project_dir" in errors


def test_one_screen_of_a_run_that_has_ended(resumed, run_command):
    code, output, errors = accel(run_command, "watch", resumed[0], "--once", "--steps", 60)

    assert (code, errors) == (0, "")
    for text in (
        "ended after",
        "step 30 of 60",
        f"of {100 // resumed[2]} batches",
        "loss: ",
        "checkpoint of step 10",
        "time: ",
    ):
        assert text in output
    assert " left" not in output
    assert len(output.splitlines()) <= 40


def test_without_a_terminal_a_run_that_has_ended_is_one_line(resumed, run_command):
    code, output, _ = accel(run_command, "watch", resumed[0])

    assert code == 0
    (only,) = output.splitlines()
    assert "step 30, loss " in only
    assert "tokens/s" in only


def begin(start_command, folder):
    """Start a run in another process: 30 steps of at least 0.1 s."""
    job = f"monitor_job.train(pathlib.Path({str(folder)!r}), None, False, 0.1, 0.1)"
    path = str(Path(__file__).parent)
    code = f"import pathlib, monitor_job; {job}"
    return start_command([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})


def screen_of(master, seconds, until):
    """What came to the terminal until this text was there."""
    seen, end = b"", time.monotonic() + seconds
    while until.encode() not in seen:
        assert time.monotonic() < end, seen[-3000:].decode(errors="replace")
        if select.select([master], [], [], 0.2)[0]:
            try:
                seen += os.read(master, 65536)
            except OSError:  # the other side is closed
                break
    return seen.decode(errors="replace")


@pytest.fixture
def watch(tmp_path, start_command):
    """Begins a watch on a terminal of its own: its process, and the terminal's other side."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    command = [*ACCEL, "watch", str(tmp_path)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    process = start_command(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
    signal.signal(signal.SIGINT, before)
    os.close(slave)
    yield process, master
    process.kill()
    process.wait()
    os.close(master)


def test_a_run_is_followed_from_before_it_begins_until_it_ends(tmp_path, watch, start_command):
    process, master = watch
    run = begin(start_command, tmp_path)

    seen = screen_of(master, 100, "ended after")
    assert run.wait(patience(20)) == process.wait(patience(20)) == 0
    for text in ("has no record yet", "runs for", "step 30", "checkpoint of step 10", "left"):
        assert text in seen


def test_ctrl_c_ends_it_without_an_error(tmp_path, watch):
    process, master = watch
    path = tmp_path / "records" / "a.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"kind": "run", "time": time.time(), "step": 7}) + "\n")

    screen_of(master, 60, "runs for")
    process.send_signal(signal.SIGINT)
    # The screen is as it was. It is read first: a terminal that nobody reads holds up who writes.
    assert "Traceback" not in screen_of(master, 20, "\x1b[?1049l")
    assert process.wait(patience(20)) == 0


def test_a_run_that_writes_nothing_says_for_how_long():
    record = Record("a.jsonl", "a")
    record.add({"kind": "run", "time": time.time() - 500, "step": 7, "config": []})

    assert "step 7" in line(record, None)
    assert "nothing new for 8 min" in line(record, None)
    assert frame(record, 80, 24, None) is not None


def test_a_record_without_a_line_yet_is_shown():
    assert "has written nothing yet" in line(Record("a.jsonl", "a"), None)
    assert frame(Record("a.jsonl", "a"), 80, 24, None) is not None


def test_a_run_that_begins_anew_is_followed_into_its_new_record(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    head = json.dumps({"kind": "run", "time": time.time(), "step": 0}) + "\n"
    (folder / "20260101-a.jsonl").write_text(head)
    newest = Newest(tmp_path, once=False)
    (folder / "20260102-b.jsonl").write_text(head)

    assert newest.read().path.name == "20260102-b.jsonl"
    os.utime(folder / "20260101-a.jsonl")  # one that goes on beside it
    assert newest.read().path.name == "20260102-b.jsonl"


def test_the_screen_has_the_devices_sensors():
    record = Record(Path("a.jsonl"), "a")
    record.add({"kind": "run", "time": 1.0, "step": 0})
    record.add({"kind": "step", "time": 2.0, "step": 1, "seconds": 1.0, "health": {"temperature": 83}})

    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(frame(record, 80, 30, None))

    assert re.search(r"device temperature +\S+ +83", shown.get())


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "\u202eloss", "loss\rgone"])
def test_no_text_of_a_record_moves_the_cursor(name):
    record = Record(Path("a.jsonl"), name)
    record.add({"kind": "run", "time": 1.0, "step": 0, "host": name, "explain": [name]})
    record.add({"kind": "log", "time": 2.0, "step": 1, "given": 1, "values": {f"loss {name}": 1.0}})
    record.add({"kind": "warning", "time": 2.0, "step": 1, "text": name})

    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(summary([record], 80))
        screen.print(frame(record, 80, 30, None))
    told = shown.get() + line(record, None)

    assert not {"\x1b", "\u202e", "\r"} & set(told)
    assert repr(name)[1:-1] in told


def test_a_loss_that_was_never_finite_is_not_called_absent():
    record = Record(Path("a.jsonl"), "a")
    record.add({"kind": "run", "time": 1.0, "step": 0})
    record.add({"kind": "log", "time": 2.0, "step": 1, "given": 1, "values": {"loss": "NaN"}})

    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(frame(record, 80, 30, None))
    assert "loss: nan, and none of its 1 values is finite" in shown.get()


def test_the_scale_is_that_of_the_curve_which_is_drawn():
    """Of many values means are drawn, whose extremes are not theirs."""
    record = Record(Path("a.jsonl"), "a")
    record.add({"kind": "run", "time": 1.0, "step": 0})
    for step in range(1, 2000):
        values = {"loss": step % 2 * 2.0}
        record.add({"kind": "log", "time": 2.0, "step": step, "given": step, "values": values})

    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(losses(record, 80, 4))
    title, top, *_, bottom = shown.get().rstrip().splitlines()

    assert title == "loss: 2 -> 2, steps 1 to 1999"
    assert 0.8 < float(bottom.split()[0]) <= float(top.split()[0]) < 1.2
    assert len(top) <= 80


@pytest.mark.parametrize("width", range(1, 12))
def test_a_narrow_terminal_is_no_error(width):
    record = Record(Path("a.jsonl"), "a")
    record.add({"kind": "run", "time": 1.0, "step": 0})
    for step in range(1, 30):
        record.add({"kind": "step", "time": 2.0, "step": step, "lr": 1.0 / step, "seconds": 1.0})

    screen = Console(width=width)
    with screen.capture():
        screen.print(frame(record, width, 5, None))
