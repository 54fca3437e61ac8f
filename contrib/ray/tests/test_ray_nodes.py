"""On a real Ray cluster of two nodes: ranks find each other, fail together, and outlive a lost node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import add_node

from accel_testing.patience import patience

JOB = str(Path(__file__).with_name("ray_job.py"))
ACCEL = (sys.executable, "-m", "accel_core")
TWO_NODES = ("--device", "cpu", "--nodes", "2", "-n", "2")
LAUNCH = (*ACCEL, "launch", "--launcher", "ray", *TWO_NODES)
SECONDS = patience(240)
pytestmark = [
    pytest.mark.full,  # a busy machine takes minutes to start a cluster
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # sockets of Ray
]


@pytest.fixture
def environment(cluster: Any) -> dict[str, str]:
    """The variables with which commands find the cluster."""
    return {**os.environ, "RAY_ADDRESS": cluster.address}


@pytest.fixture
def run(
    environment: dict[str, str], tmp_path: Path, run_command
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in an empty folder."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_command(
            words,
            env={**environment, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    return run


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def wait_for(is_there: Callable[[], object], about: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + SECONDS
    while not is_there():
        assert time.monotonic() < deadline, about()
        time.sleep(0.2)


def living(folder: Path) -> list[int]:
    return [it["process"] for it in written(folder) if lives(it["process"])]


def lives(process: object) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_of_two_nodes_train_together(run, tmp_path):
    ended = run(*LAUNCH, JOB, "meet", str(tmp_path), ACCEL_GIVEN="1")

    assert ended.returncode == 0, ended.stderr
    worlds = [(it["RANK"], it["LOCAL_RANK"], it["GROUP_RANK"], it["sum"]) for it in written(tmp_path)]
    assert worlds == [("0", "0", "0", 6), ("1", "1", "0", 6), ("2", "0", "1", 6), ("3", "1", "1", 6)]
    assert [(it["OMP_NUM_THREADS"], it["ACCEL_GIVEN"], it["folder"]) for it in written(tmp_path)] == [
        ("1", "1", str(tmp_path))
    ] * 4
    assert len({it["ACCEL_RUN_ID"] for it in written(tmp_path)}) == 1


def test_the_first_rank_that_fails_gives_the_exit_code_and_ends_the_job(run, tmp_path):
    ended = run(*LAUNCH, JOB, "fail", str(tmp_path))

    assert ended.returncode == 7, ended.stderr
    assert ended.stderr.count("accel: rank 3 (local 1) exited with code 7") == 1
    assert "another node failed: rank 3" in ended.stderr
    assert living(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--nodes", "3"), "3 nodes with CPU 2 each were asked for, and the cluster has "),
        (("--ray.gpus-per-process", "1"), "2 nodes with CPU 2, GPU 2 each were asked for, and the cluster"),
        (("--ray.address", "127.0.0.1:1"), "no cluster of Ray answers at 127.0.0.1:1: "),
        (("--ray.address", "ray://127.0.0.1:1"), "ray://127.0.0.1:1 is not the address of a cluster"),
        (
            ("--min-nodes", "1", "--max-restarts", "1"),
            "launch.min_nodes: launcher ray starts a job again",
        ),
        (("--rendezvous", "127.0.0.1:1"), "launch.node_rank and launch.rendezvous: launcher ray starts all"),
    ],
    ids=["nodes", "gpus", "address", "client", "min-nodes", "rendezvous"],
)
def test_what_the_cluster_cannot_give_is_one_error_before_training(run, tmp_path, flags, found):
    ended = run(*LAUNCH, *flags, JOB, "write", str(tmp_path))

    assert ended.returncode == 1
    assert ended.stderr.count("accel: ") == 1, ended.stderr
    assert f"accel: {found}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert written(tmp_path) == []


def test_a_job_that_is_handed_over_is_watched_and_cancelled_by_ray(run, cluster, tmp_path):
    from ray.job_submission import JobSubmissionClient

    (tmp_path / "accel.yaml").write_text("launch: {launcher: ray}\n")
    server = f"http://{cluster.head_node.webui_url}"
    words = ("--ray.address", server, "--ray.working-dir", ".", *TWO_NODES)
    # The script lies in the sent folder, and its results where it is told.
    (tmp_path / "train.py").write_text(Path(JOB).read_text())

    submitted = run(*ACCEL, "submit", *words, "train.py", "wait", str(tmp_path), ACCEL_GIVEN="1")

    assert submitted.returncode == 0, submitted.stderr
    said = dict(line.split(": ", 1) for line in submitted.stdout.splitlines())
    where = f"--address {server} {said['job']}"
    assert said["watch"] == f"ray job status {where}"
    assert said["logs"] == f"ray job logs --follow {where}"
    client = JobSubmissionClient(server)
    wait_for(lambda: len(written(tmp_path)) == 4, lambda: client.get_job_logs(said["job"]))
    assert {it["ACCEL_GIVEN"] for it in written(tmp_path)} == {"1"}
    assert {it["ACCEL_RUN_ID"] for it in written(tmp_path)} == {f"ray-{said['job']}"}
    assert "working_dir_files" in written(tmp_path)[3]["folder"]

    cancelled = run(*said["cancel"].split())

    assert cancelled.returncode == 0, cancelled.stderr
    wait_for(lambda: not living(tmp_path))
    assert client.get_job_status(said["job"]).value == "STOPPED"


def test_launcher_auto_takes_the_cluster_inside_a_job_of_ray(cluster, tmp_path):
    from ray.job_submission import JobSubmissionClient

    client = JobSubmissionClient(f"http://{cluster.head_node.webui_url}")
    words = (*ACCEL, "launch", *TWO_NODES, JOB, "meet", str(tmp_path))

    job = client.submit_job(entrypoint=f"cd {tmp_path} && {' '.join(words)}")

    wait_for(lambda: client.get_job_status(job).is_terminal(), lambda: client.get_job_logs(job))
    assert client.get_job_status(job).value == "SUCCEEDED", client.get_job_logs(job)
    assert [it["sum"] for it in written(tmp_path)] == [6, 6, 6, 6]


@contextmanager
def started(
    start_command, words: Sequence[str], environment: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Give a command that runs; what it says goes to the file `errors`."""
    with (
        (folder / "errors").open("w") as errors,
        start_command(words, env=environment, cwd=folder, stderr=errors) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_launcher_that_is_stopped_leaves_no_worker(environment, tmp_path, number, start_command):
    with started(start_command, (*LAUNCH, JOB, "wait", str(tmp_path)), environment, tmp_path) as process:
        wait_for(lambda: len(written(tmp_path)) == 4, (tmp_path / "errors").read_text)
        process.send_signal(number)
        process.wait(patience(60))

    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    wait_for(lambda: not living(tmp_path))


def test_a_lost_node_starts_the_job_again_from_its_last_checkpoint(
    environment, cluster, tmp_path, start_command
):
    flags = ("--max-restarts", "1", "--ray.wait-seconds", "200")
    lost = cluster.list_all_nodes()[-1]
    with started(
        start_command, (*LAUNCH, *flags, JOB, "train", str(tmp_path)), environment, tmp_path
    ) as process:
        wait_for((tmp_path / "step").exists, (tmp_path / "errors").read_text)
        before = [it["process"] for it in written(tmp_path)]
        cluster.remove_node(lost, allow_graceful=False)
        wait_for(lambda: not any(map(lives, before)), lambda: before)  # those of both nodes
        add_node(cluster)
        process.wait(SECONDS)

    errors = (tmp_path / "errors").read_text()
    assert process.returncode == 0, errors
    assert "was lost: " in errors
    assert "; restart 1 of 1\n" in errors
    done = json.loads((tmp_path / "done").read_text())
    assert 0 < done["began"] < 40
    assert done["ended"] == 40


def test_a_lost_node_without_a_restart_is_named(environment, cluster, tmp_path, start_command):
    lost = cluster.list_all_nodes()[-1]
    with started(start_command, (*LAUNCH, JOB, "wait", str(tmp_path)), environment, tmp_path) as process:
        wait_for(lambda: len(written(tmp_path)) == 4, (tmp_path / "errors").read_text)
        cluster.remove_node(lost, allow_graceful=False)
        process.wait(SECONDS)

    errors = (tmp_path / "errors").read_text()
    add_node(cluster)
    assert process.returncode == 1, errors
    assert "with --max-restarts 3 the job starts again" in errors
    wait_for(lambda: not living(tmp_path))
