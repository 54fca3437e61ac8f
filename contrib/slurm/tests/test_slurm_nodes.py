"""On a real Slurm of two nodes: ranks find each other, fail together, and are saved, requeued, resumed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accel_testing.patience import patience

JOB = str(Path(__file__).with_name("slurm_job.py"))
ACCEL = (sys.executable, "-m", "accel_core")
LAUNCH = (*ACCEL, "launch", "--device", "cpu")
SECONDS = patience(120)


@pytest.fixture
def run(
    slurm: dict[str, str], tmp_path: Path, run_command
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in an empty folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_command(
            words, env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    return run


def written(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*-rank*.json"))]


def wait_for(is_there: Callable[[], object], about: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < deadline, about()
        time.sleep(0.2)


def shown(run: Callable[..., subprocess.CompletedProcess[str]], job: str) -> str:
    return run("scontrol", "--oneliner", "show", "job", job).stdout


def lives(process: object) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_one_task_per_node_starts_the_ranks_of_its_node(run, tmp_path):
    ended = run("srun", "-N2", "--ntasks-per-node=1", *LAUNCH, "-n", "2", JOB, "meet", str(tmp_path))

    assert ended.returncode == 0, ended.stderr
    worlds = [(it["RANK"], it["LOCAL_RANK"], it["LOCAL_WORLD_SIZE"], it["sum"]) for it in written(tmp_path)]
    assert worlds == [("0", "0", "2", 6), ("1", "1", "2", 6), ("2", "0", "2", 6), ("3", "1", "2", 6)]
    assert ended.stderr.count("2 nodes x 2 = 4 processes") == 1


def test_one_task_per_rank_is_a_rank_of_its_own_number(run, tmp_path):
    ended = run("srun", "-N2", "--ntasks-per-node=2", *LAUNCH, JOB, "meet", str(tmp_path))

    assert ended.returncode == 0, ended.stderr
    worlds = [(it["RANK"], it["LOCAL_RANK"], it["GROUP_RANK"], it["sum"]) for it in written(tmp_path)]
    assert worlds == [("0", "0", "0", 6), ("1", "1", "0", 6), ("2", "0", "1", 6), ("3", "1", "1", 6)]


def test_the_first_rank_that_fails_gives_the_exit_code_and_ends_the_job(run, tmp_path):
    ended = run("srun", "-N2", "--ntasks-per-node=1", *LAUNCH, "-n", "2", JOB, "fail", str(tmp_path))

    assert ended.returncode == 7, ended.stderr
    assert "accel: rank 3 (local 1) exited with code 7" in ended.stderr
    assert "another node failed: rank 3" in ended.stderr
    assert [it["process"] for it in written(tmp_path) if lives(it["process"])] == []


def test_two_steps_of_one_job_at_the_same_time_keep_apart(run, tmp_path):
    launch = " ".join((*LAUNCH, JOB, "meet", str(tmp_path)))
    both = f"srun --overlap -n2 {launch} & srun --overlap -n2 {launch}; first=$?; wait $! && exit $first"

    ended = run("salloc", "-N2", "--ntasks-per-node=1", "bash", "-c", both)

    assert ended.returncode == 0, ended.stderr
    assert [it["sum"] for it in written(tmp_path)] == [1, 1, 1, 1]
    assert len({it["ACCEL_RUN_ID"] for it in written(tmp_path)}) == 2


def test_a_smaller_allocation_than_asked_for_is_one_error_per_node(run, tmp_path):
    ended = run("srun", "-N2", "--ntasks-per-node=1", *LAUNCH, "--nodes", "3", JOB, "meet", str(tmp_path))

    assert ended.returncode == 1
    # srun mixes the lines of the two nodes.
    asked = r"^accel: 3 nodes were asked for \(launch.nodes\), and step [\d.]+ of Slurm has 2: n\[1-2\]$"
    assert len(re.findall(asked, ended.stderr, re.MULTILINE)) == 2
    remedy = "give sbatch, salloc or srun --nodes=3, or leave launch.nodes out"
    assert ended.stderr.splitlines().count(remedy) == 2
    assert written(tmp_path) == []


def test_a_batch_script_of_several_nodes_does_not_train_on_one(run, tmp_path):
    ended = run("salloc", "-N2", *LAUNCH, JOB, "meet", str(tmp_path))

    assert ended.returncode == 1
    assert "start it on each node with `srun --ntasks-per-node=1 accel launch ...`" in ended.stderr
    assert written(tmp_path) == []


def test_a_bad_option_is_refused_with_the_words_of_sbatch(run, tmp_path):
    options = ("--launcher", "slurm", "--slurm.options", "--partition=nowhere")

    ended = run(*ACCEL, "submit", *options, JOB, "meet", str(tmp_path))

    assert ended.returncode == 1
    assert (
        "accel: sbatch refused the job: sbatch: error: invalid partition specified: nowhere" in ended.stderr
    )
    assert ended.stderr.endswith("`accel submit --dry-run` shows the batch file\n")


@pytest.mark.full
def test_a_job_that_is_told_of_its_end_saves_and_resumes(run, tmp_path):
    """The signal is sent by scancel here; test_the_time_limit waits for Slurm's own."""
    words = ("--launcher", "slurm", "--device", "cpu", "--nodes", "2", "-n", "1")
    submitted = run(*ACCEL, "submit", *words, JOB, "train", str(tmp_path))
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.partition("\n")[0].removeprefix("job: ")
    assert (
        f"watch: squeue --jobs {job}\ncancel: scancel {job}\nlogs: {tmp_path}/slurm-{job}.out"
        in submitted.stdout
    )
    output = tmp_path / f"slurm-{job}.out"
    wait_for((tmp_path / "step").exists, lambda: shown(run, job) + output.read_text())

    assert run("scancel", "--batch", "--signal=USR1", job).returncode == 0

    wait_for((tmp_path / "done").exists, lambda: shown(run, job) + output.read_text())
    done = json.loads((tmp_path / "done").read_text())
    assert 0 < done["began"] < 400
    assert done["ended"] == 400
    assert f"job {job} goes into the queue again" in output.read_text()
    assert "Restarts=1" in shown(run, job)


@pytest.mark.full
def test_the_jobs_of_an_array_are_apart(run, tmp_path):
    words = (
        "--launcher",
        "slurm",
        "--device",
        "cpu",
        "--nodes",
        "2",
        "-n",
        "1",
        "--slurm.options",
        "--array=0-1",
    )

    submitted = run(*ACCEL, "submit", *words, JOB, "meet", str(tmp_path))

    assert submitted.returncode == 0, submitted.stderr
    wait_for(lambda: len(written(tmp_path)) == 4, lambda: run("squeue").stdout)
    assert [it["sum"] for it in written(tmp_path)] == [1, 1, 1, 1]
    assert len({it["ACCEL_RUN_ID"] for it in written(tmp_path)}) == 2


def test_a_cancelled_job_leaves_no_worker(run, tmp_path):
    words = ("--launcher", "slurm", "--device", "cpu", "--nodes", "2", "-n", "1")
    submitted = run(*ACCEL, "submit", *words, JOB, "fail", str(tmp_path))
    job = submitted.stdout.partition("\n")[0].removeprefix("job: ")
    wait_for(lambda: len(written(tmp_path)) == 2)

    run("scancel", job)

    wait_for(lambda: not any(lives(it["process"]) for it in written(tmp_path)))


@pytest.mark.full
def test_the_time_limit(run, tmp_path):
    """Slurm's own signal, 30 s before a limit of one minute."""
    options = ("--slurm.options", "--time=1", "--slurm.warning-seconds", "30")
    words = ("--launcher", "slurm", "--device", "cpu", "--nodes", "2", "-n", "1", *options)

    run(*ACCEL, "submit", *words, JOB, "train", str(tmp_path))

    wait_for((tmp_path / "done").exists)
    assert json.loads((tmp_path / "done").read_text())["began"] > 0
