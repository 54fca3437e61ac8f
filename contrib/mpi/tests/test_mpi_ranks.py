"""Under the mpirun of this machine: Open MPI's and MPICH's, each skipped where it is absent."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

JOB = str(Path(__file__).with_name("mpi_job.py"))
LAUNCH = (sys.executable, "-m", "accel_core", "launch", "--device", "cpu")
ROOT = {  # Open MPI wants to be asked twice before it runs as root, and with more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
PROGRAMS = {"Open MPI": ("mpirun.openmpi", "mpirun"), "HYDRA": ("mpirun.mpich", "mpiexec.hydra")}


def program(run_command, kind: str) -> str:
    """Return the mpirun of this kind; skip the test where there is none."""
    for name in PROGRAMS[kind]:
        path = shutil.which(name)
        if (
            path
            and kind in run_command([path, "--version"], capture_output=True, text=True, check=True).stdout
        ):
            return path
    return pytest.skip(f"no mpirun of {kind} is installed")


def run(run_command, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ROOT, **variables}
    return run_command(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=200, check=False
    )


def written(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank*.json"))]


def first_on_path(run_command, kind: str, folder: Path) -> str:
    """Return a PATH on which `mpirun` is that of this kind."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "mpirun"  # not a link: MPICH looks for its other programs beside itself
    script.write_text(f'#!/bin/sh\nexec {program(run_command, kind)} "$@"\n')
    script.chmod(0o755)
    return f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"


def lives(process: object) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("kind", PROGRAMS)
def test_ranks_of_mpirun_train_together(tmp_path, kind, run_command):
    ended = run(
        run_command, tmp_path, program(run_command, kind), "-n", "2", *LAUNCH, JOB, "meet", str(tmp_path)
    )

    assert ended.returncode == 0, ended.stderr
    worlds = [(it["RANK"], it["LOCAL_RANK"], it["LOCAL_WORLD_SIZE"], it["sum"]) for it in written(tmp_path)]
    assert worlds == [("0", "0", "2", 1), ("1", "1", "2", 1)]
    assert ended.stderr.count("2 tasks x 1 = 2 processes") == 1


@pytest.mark.parametrize("kind", PROGRAMS)
def test_ranks_meet_though_a_script_stands_between(tmp_path, kind, run_command):
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\n{shlex.join((*LAUNCH, JOB, 'write', str(tmp_path)))}\nexit $?\n")
    script.chmod(0o755)

    ended = run(run_command, tmp_path, program(run_command, kind), "-n", "2", str(script))

    assert ended.returncode == 0, ended.stderr
    assert [it["RANK"] for it in written(tmp_path)] == ["0", "1"]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_accel_launch_calls_mpirun(tmp_path, kind, run_command):
    flags = ("--launcher", "mpi", "-n", "2", "--mpi.ccl-workers", "3")

    ended = run(
        run_command,
        tmp_path,
        *LAUNCH,
        *flags,
        JOB,
        "meet",
        str(tmp_path),
        PATH=first_on_path(run_command, kind, tmp_path),
    )

    assert ended.returncode == 0, ended.stderr
    assert [(it["sum"], it["CCL_WORKER_COUNT"]) for it in written(tmp_path)] == [(1, "3"), (1, "3")]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_rank_that_fails_gives_the_exit_code_even_rank_0(tmp_path, kind, run_command):
    ended = run(
        run_command, tmp_path, program(run_command, kind), "-n", "2", *LAUNCH, JOB, "fail", str(tmp_path)
    )

    assert ended.returncode == 7, ended.stderr
    assert "accel: rank 0 (local 0) exited with code 7" in ended.stderr
    assert [it["process"] for it in written(tmp_path) if lives(it["process"])] == []


def test_more_nodes_than_mpirun_has_is_an_error_before_training(tmp_path, run_command):
    words = ("-n", "1", *LAUNCH, "--nodes", "2", JOB, "write", str(tmp_path))

    ended = run(run_command, tmp_path, program(run_command, "Open MPI"), *words)

    assert ended.returncode == 1
    assert (
        "accel: launch.nodes 2 was asked for, and mpirun has started 1 ranks, 1 of them on this machine\n"
        "leave launch.nodes out, or give mpirun the same numbers\n"
    ) in ended.stderr
    assert written(tmp_path) == []
