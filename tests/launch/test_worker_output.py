"""What workers write goes to files by rank and attempt, and to the terminal in whole lines."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from accel_core.contract.job import Job
from accel_core.launch.launcher import launch_function
from accel_core.launch.output import _new_attempt, _Tailed, _Tailer
from accel_testing.commands import ACCEL, clean_environment

SCRIPT = """\
import os, sys, time
rank = os.environ["RANK"]
for number in range(20):
    sys.stdout.write(f"{rank} says ")
    sys.stdout.flush()
    time.sleep(0.01)
    sys.stdout.write(f"line {number}\\n")
print("complains", rank, file=sys.stderr)
sys.stdout.write("no end")
"""
FAILS_ONCE = """\
import os, time
from pathlib import Path
rank, attempt, said = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], Path("said")
print("attempt", attempt, flush=True)
if (rank, attempt) == ("0", "0"):
    said.touch()
if (rank, attempt) == ("1", "0"):
    while not said.exists():  # the failure ends rank 0, which may not have begun
        time.sleep(0.01)
    said.unlink()
    raise ValueError("bad luck")
"""

LAUNCHER = """\
from accel_core import hooks, implements

class Launcher:
    def __init__(self, config, run):
        pass

    @implements(hooks.launch)
    def launch(self, job):
        return 0
"""


@pytest.fixture
def launch(tmp_path, accel):
    """Launch a script on two workers."""

    def run(text, *flags):
        (tmp_path / "script.py").write_text(text)
        return accel("launch", "--device", "cpu", "-n", "2", *flags, "script.py", cwd=tmp_path)

    return run


def test_each_rank_has_files_of_its_own_and_the_terminal_none_of_it(launch, tmp_path):
    ended = launch(SCRIPT, "--log-dir", "logs")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    assert "complains" not in ended.stderr
    for rank in range(2):
        written = (tmp_path / "logs" / f"rank-0000{rank}.attempt-0.out").read_text()
        assert written == "".join(f"{rank} says line {number}\n" for number in range(20)) + "no end"
        assert f"complains {rank}\n" in (tmp_path / "logs" / f"rank-0000{rank}.attempt-0.err").read_text()


def test_lines_of_all_ranks_are_whole_and_have_their_rank(launch, tmp_path):
    ended = launch(SCRIPT, "--tee", "all", "--log-dir", "logs")

    lines = ended.stdout.splitlines()
    assert sorted(lines) == sorted(
        [
            *(f"[rank {rank}] {rank} says line {number}" for rank in range(2) for number in range(20)),
            *(f"[rank {rank}] no end" for rank in range(2)),
        ]
    )
    assert "[rank 1] complains 1\n" in ended.stderr
    assert len([*(tmp_path / "logs").iterdir()]) == 4


def test_the_main_process_alone_may_be_printed(launch):
    ended = launch(SCRIPT, "--tee", "main")

    assert {line[:8] for line in ended.stdout.splitlines()} == {"[rank 0]"}


def test_a_restart_and_a_second_job_write_files_of_their_own(launch, tmp_path):
    for _ in range(2):
        assert launch(FAILS_ONCE, "--log-dir", "logs", "--max-restarts", "1").returncode == 0

    found = {path.name: path.read_text() for path in (tmp_path / "logs").glob("rank-00000*.out")}
    assert found == {f"rank-00000.attempt-{n}.out": f"attempt {n % 2}\n" for n in range(4)}
    errors = (tmp_path / "logs" / "rank-00001.attempt-0.err").read_text()
    assert "ValueError: bad luck" in errors


def test_the_traceback_of_the_first_failure_is_still_printed(launch):
    ended = launch("raise ValueError('bad luck')\n", "--log-dir", "logs")

    assert ended.returncode == 1
    assert len(re.findall("ValueError: bad luck", ended.stderr)) >= 1


def test_a_launcher_without_it_refuses(toys, accel):
    modules = {"toy_own": LAUNCHER}
    environment = toys("mine", "launcher", implementation="'toy_own:Launcher'", modules=modules)

    ended = accel("launch", "--launcher", "mine", "--tee", "all", "-m", "this", environment=environment)

    assert ended.returncode == 1
    assert "launcher mine does not handle the output of workers\nleave them out" in ended.stderr


def test_functions_write_to_files_too(tmp_path):
    job = Job(argv=(), processes_per_node=2, log_dir=str(tmp_path))

    launch_function(print, ("hello",), job)

    assert {path.name: path.read_text() for path in tmp_path.glob("*.out")} == {
        f"rank-0000{rank}.attempt-0.out": "hello\n" for rank in range(2)
    }


def test_a_line_is_printed_when_it_is_whole(tmp_path, capsys):
    tailed = _Tailed(tmp_path / "file", 7, sys.stdout)
    tailed.print(whole=False)
    for text, printed in (("one\ntw", "[rank 7] one\n"), ("o\n", "[rank 7] two\n"), ("rest", "")):
        with Path(tmp_path / "file").open("a") as file:
            file.write(text)
        tailed.print(whole=False)
        assert capsys.readouterr().out == printed
    tailed.print(whole=True)
    assert capsys.readouterr().out == "[rank 7] rest\n"


def test_of_a_bar_the_terminal_gets_what_it_would_show(tmp_path, capsys):
    tailed = _Tailed(tmp_path / "file", 0, sys.stdout)
    for text in ("10%\r20", "%\r", "done\r\n"):
        with Path(tmp_path / "file").open("a", newline="") as file:
            file.write(text)
        tailed.print(whole=False)

    assert capsys.readouterr().out == "[rank 0] done\n"


def test_a_terminal_that_is_gone_costs_its_lines_and_not_the_job(tmp_path, capsys):
    (tmp_path / "file").write_text("one\ntwo\n")
    with Path("/dev/full").open("w") as full:
        _Tailer([_Tailed(tmp_path / "file", 0, full), _Tailed(tmp_path / "file", 1, full)]).end()

    told = "accel: output of the workers is printed no more: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == told


def test_jobs_that_start_together_write_files_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: _new_attempt(tmp_path, [0, 1]), range(24)))

    assert sorted(found) == list(range(24))


def test_a_folder_that_cannot_be_made_is_named(launch, tmp_path):
    (tmp_path / "logs").write_text("")

    ended = launch(SCRIPT, "--log-dir", "logs")

    assert ended.returncode == 1
    assert ended.stderr.count("\n") < 4
    assert "launch.log_dir: the files of the workers cannot be made: [Errno 17] File exists" in ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_workers_of_a_caller_that_closed_its_standard_streams_start(tmp_path, closed, run_command):
    (tmp_path / "train.py").write_text(
        "import os, pathlib\n"
        "os.write(2, b'from a library')\n"
        "pathlib.Path('rank' + os.environ['RANK']).touch()\n"
    )

    ended = run_command(
        ["sh", "-c", f'"$0" launch -n 2 train.py {closed}', ACCEL],
        env=clean_environment(),
        cwd=tmp_path,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]
