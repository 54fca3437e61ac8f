"""Tasks of an engine: each knows where it is, and none of several trains alone."""

from __future__ import annotations

import pytest

from accel_core import Accelerator, Job, LaunchError, World
from accel_core.launch.launcher import TorchrunLauncher
from accel_core.plugins.discovery import Discovery, discover
from accel_core.plugins.tasks import refuse_lone_task, task_here

VARIABLES = [
    "SLURM_STEP_NUM_TASKS",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
]
TOY = """
from accel_core import Card, Task

def task(variables):
    if "TOY_SIZE" in variables:
        return Task(size=4, rank=1, local_rank=1, local_size=2, variable="TOY_SIZE")

def broken(variables):
    raise OSError("no toy")

CARD = Card(name="toy", slot="launcher", summary="A toy.", api_version="1.0", task="{module}:{function}")
"""


@pytest.fixture
def start_as(monkeypatch):
    """Give this process the variables of a task."""

    def start(**variables: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    return start


def refuse(discovery: Discovery | None = None, nodes: int = 1) -> None:
    discovery = discover() if discovery is None else discovery
    refuse_lone_task(task_here(discovery), discovery, nodes)


@pytest.mark.parametrize("variable", VARIABLES)
def test_one_of_several_tasks_that_know_nothing_of_each_other_is_refused(variable, start_as):
    start_as(**{variable: "4"})
    with pytest.raises(LaunchError, match=f"4 tasks \\({variable}\\), and each would train alone"):
        refuse()


def test_a_task_that_knows_its_number_only_is_refused_as_one_of_several(start_as):
    start_as(PMIX_RANK="1")
    with pytest.raises(LaunchError, match=r"several tasks \(PMIX_RANK=1\)"):
        refuse()


def test_a_size_that_a_batch_script_exports_does_not_make_a_rank_of_a_task(start_as):
    start_as(SLURM_STEP_NUM_TASKS="2", WORLD_SIZE="2")
    with pytest.raises(LaunchError, match="each would train alone: RANK and WORLD_SIZE are not set"):
        refuse()


def test_an_accelerator_of_a_task_is_refused(start_as):
    start_as(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="1")
    with pytest.raises(LaunchError, match="SLURM_STEP_NUM_TASKS"):
        Accelerator(cpu=True)


def test_a_launcher_refuses_to_be_one_of_several_tasks(start_as):
    start_as(OMPI_COMM_WORLD_SIZE="2")
    with pytest.raises(LaunchError, match=r"2 tasks .OMPI_COMM_WORLD_SIZE., and each would train alone"):
        TorchrunLauncher().launch(Job(argv=("x",)))
    with pytest.raises(LaunchError, match="each would be a launcher of 4 nodes"):
        refuse(nodes=4)
    refuse(nodes=2)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "4", "WORLD_SIZE": "4", "RANK": "0"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ],
    ids=["no engine", "one task", "a launcher's worker", "the batch script of a bigger job"],
)
def test_a_task_that_is_alone_or_knows_its_world_is_not_refused(variables, start_as):
    start_as(**variables)
    refuse()  # the others above raise


@pytest.mark.parametrize(
    ("variable", "package"),
    [("SLURM_STEP_NUM_TASKS", "contrib/slurm"), ("OMPI_COMM_WORLD_SIZE", "contrib/mpi")],
)
def test_the_package_that_serves_such_tasks_is_named_where_it_is_not_installed(variable, package, start_as):
    start_as(**{variable: "4"})
    with pytest.raises(LaunchError, match=package):
        refuse(Discovery([]))


@pytest.fixture
def install(toy_distribution):
    def install_toy(function: str) -> None:
        toy_distribution(
            "accel-toy",
            entry_points={"accel_core.launcher": {"toy": f"toy_{function}:CARD"}},
            modules={f"toy_{function}": TOY.format(module=f"toy_{function}", function=function)},
        )

    return install_toy


def test_a_launchers_own_function_tells_the_task_and_the_remedy_names_the_launcher(install, start_as):
    install("task")
    start_as(TOY_SIZE="4")
    with pytest.raises(LaunchError, match=r"4 tasks \(TOY_SIZE\)[^$]*accel launch --launcher toy"):
        refuse()


def test_a_rank_that_no_variable_places_on_its_node_is_placed_by_the_launchers_function(install, start_as):
    install("task")
    start_as(TOY_SIZE="4", RANK="1", WORLD_SIZE="4")
    world = World.here(task_here(discover()))

    assert (world.local_rank, world.local_size, world.nodes, world.is_task) == (1, 2, 2, True)


def test_a_launcher_whose_function_is_broken_harms_nobody(install, start_as):
    install("broken")
    start_as()
    assert task_here(discover()) is None


def test_tasks_are_refused_too_where_the_function_of_their_launcher_is_broken(toy_distribution, start_as):
    toy_distribution(
        "accel-slurm",
        entry_points={"accel_core.launcher": {"slurm": "toy_slurm:CARD"}},
        modules={"toy_slurm": TOY.format(module="toy_slurm", function="broken").replace('"toy"', '"slurm"')},
    )
    start_as(SLURM_STEP_NUM_TASKS="4")
    with pytest.raises(LaunchError, match="this is one of 4 tasks"):
        refuse()
