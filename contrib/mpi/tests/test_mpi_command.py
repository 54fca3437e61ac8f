"""Pure parts, without MPI: variables of each MPI, the command line, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_core import Job, LaunchConfig, LaunchError
from accel_mpi.command import mpirun
from accel_mpi.config import MpiConfig
from accel_mpi.launcher import MpiLauncher
from accel_mpi.ranks import Ranks
from accel_mpi.task import task

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "77",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
COMMAND = (sys.executable, "-m", "accel_core", "launch", "train.py")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put an mpirun on PATH that says its version, of this kind."""

    def put(says: str) -> None:
        file = tmp_path / "mpirun"
        file.write_text(f"#!/bin/sh\necho '{says}'\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


@pytest.fixture
def hostfile(tmp_path) -> str:
    file = Path(tmp_path, "hosts")
    file.write_text("# ours\ngpu1 slots=4\ngpu2:4\n\ngpu1\n")
    return str(file)


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["Open MPI", "hydra"])
def test_a_rank_is_read_from_the_variables_of_each_mpi(variables):
    ranks = Ranks.around(variables)

    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.machines) == (5, 8, 1, 4, 2)


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["Open MPI", "hydra"])
def test_a_rank_without_a_launcher_is_known_as_a_task(variables):
    found = task(variables)

    assert (found.size, found.local_rank, found.local_size) == (8, 1, 4)


@pytest.mark.parametrize("variable", ["MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"])
def test_a_task_of_another_starter_with_mpis_variables_is_known(variable):
    assert (task({variable: "4"}).size, task({variable: "4"}).variable) == (4, variable)


def test_a_task_that_has_a_number_only_is_known():
    assert task({"PALS_RANKID": "3"}).rank == 3
    assert task({}) is None


def test_a_task_of_slurm_is_not_a_rank_of_mpirun():
    slurms = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}

    assert Ranks.around({**HYDRA, **slurms}) is None
    assert task({**HYDRA, **slurms}) is None
    assert task({"PMIX_RANK": "5", **slurms}) is None


@pytest.mark.parametrize(
    ("name", "text"), [("MPI_LOCALNRANKS", "0"), ("PMI_SIZE", "0"), ("MPI_LOCALRANKID", "x")]
)
def test_numbers_that_no_mpirun_gives_are_shown(name, text):
    with pytest.raises(LaunchError, match=f"as by mpirun, and {name} is '{text}'\nstart the ranks"):
        Ranks.around({**HYDRA, name: text})


def test_a_rank_without_a_local_number_is_refused():
    with pytest.raises(LaunchError, match="PMI_RANK is set as by mpirun, and MPI_LOCALRANKID is not"):
        Ranks.around({"PMI_RANK": "0", "PMI_SIZE": "2"})


@pytest.mark.parametrize("left_over", [{"OMPI_COMM_WORLD_RANK": "0"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_what_tells_of_no_other_rank_is_no_job_of_mpirun(left_over):
    assert Ranks.around(left_over) is None


def test_several_processes_of_one_rank_are_launched_as_without_mpirun(monkeypatch):
    for name, text in zip(HYDRA, "0101", strict=True):
        monkeypatch.setenv(name, text)
    launcher = MpiLauncher(MpiConfig(), None)

    assert launcher.allocation(LaunchConfig(processes_per_node=4)) is None
    assert launcher.allocation(LaunchConfig()).processes_per_node == 1


def test_ranks_of_several_machines_know_their_job_by_the_place_if_mpi_tells_no_name(monkeypatch):
    for name, text in HYDRA.items():
        monkeypatch.setenv(name, text)

    placed = MpiLauncher(MpiConfig(), None).allocation(LaunchConfig(rendezvous="gpu1:29500"))

    assert placed.job_id == "mpi-gpu1:29500"


def test_the_ranks_of_a_rank_are_not_told_that_they_are_one(program, monkeypatch):
    program("mpirun (Open MPI) 4.1.4")
    monkeypatch.setenv("WORLD_SIZE", "1")  # mpirun hands it on, and each rank would call mpirun again

    words = mpirun(Job(argv=(), command=COMMAND), MpiConfig())

    assert words[words.index("env") :][:5] == ["env", "-u", "RANK", "-u", "WORLD_SIZE"]


def test_ranks_of_several_machines_need_a_place(monkeypatch):
    for name, text in OPEN_MPI.items():
        monkeypatch.setenv(name, text)
    launcher = MpiLauncher(MpiConfig(), None)

    with pytest.raises(LaunchError, match="tells none where rank 0 is"):
        launcher.allocation(LaunchConfig())
    placed = launcher.allocation(LaunchConfig(rendezvous="gpu1:29500"))
    assert (placed.address, placed.nodes, placed.node_rank, placed.job_id) == ("gpu1", 8, 5, "mpi-77")


def test_open_mpi_gets_its_own_flags(program, hostfile):
    program("mpirun (Open MPI) 4.1.4")

    words = mpirun(Job(argv=(), command=COMMAND, nodes=2, processes_per_node=4), MpiConfig(hostfile=hostfile))

    assert words[1:7] == ["-n", "8", "--hostfile", hostfile, "--map-by", "ppr:4:node"]
    assert "ACCEL_MPI_ADDRESS=gpu1" in words
    assert words[-len(COMMAND) :] == list(COMMAND)


def test_hydra_gets_its_own_flags(program, hostfile):
    program("HYDRA build details:")

    config = MpiConfig(hostfile=hostfile, options="-genv A 1", ccl_workers=2)
    words = mpirun(Job(argv=(), command=COMMAND, nodes=2, processes_per_node=4), config)

    assert words[1:11] == ["-n", "8", "-f", hostfile, "-ppn", "4", "-genv", "A", "1", "env"]
    assert "CCL_WORKER_COUNT=2" in words


def test_mpirun_that_starts_several_machines_is_told_how_many_processes_each_has(program, hostfile):
    launcher = MpiLauncher(MpiConfig(), None)

    elsewhere = launcher.allocation(LaunchConfig(launcher="mpi", nodes=2))

    assert (elsewhere.elsewhere, elsewhere.nodes, elsewhere.processes_per_node) == (True, 2, None)
    assert launcher.allocation(LaunchConfig(nodes=2)) is None
    assert launcher.allocation(LaunchConfig(launcher="mpi")) is None  # one machine: this one
    program("mpirun (Open MPI) 4.1.4")
    with pytest.raises(LaunchError, match="-n auto: this machine cannot count the devices of the hosts"):
        mpirun(Job(argv=(), command=COMMAND, nodes=2, processes_per_node=0), MpiConfig(hostfile=hostfile))


def test_a_hostfile_with_too_few_machines_is_refused(program, hostfile):
    program("mpirun (Open MPI) 4.1.4")

    with pytest.raises(LaunchError, match=r"3 nodes were asked for \(launch.nodes\), and .* names 2\n"):
        mpirun(Job(argv=(), command=COMMAND, nodes=3), MpiConfig(hostfile=hostfile))
    with pytest.raises(LaunchError, match="2 nodes were asked for, and no hostfile"):
        mpirun(Job(argv=(), command=COMMAND, nodes=2), MpiConfig())


def test_without_mpirun_nothing_starts(monkeypatch):
    monkeypatch.setenv("PATH", "")

    with pytest.raises(LaunchError, match="there is no mpirun on PATH"):
        mpirun(Job(argv=(), command=COMMAND), MpiConfig())


def test_mpirun_in_a_step_of_slurm_does_not_wait_for_the_cpus_of_that_step(tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\necho $SLURM_OVERLAP > {tmp_path}/told\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    MpiLauncher(MpiConfig(), None).launch(Job(argv=(), command=("true",)))

    assert (tmp_path / "told").read_text() == "1\n"
