"""Pure parts, without Slurm: host lists, a step's variables, the batch file, what is refused."""

from __future__ import annotations

import os
import shlex
import signal
import sys

import pytest

from accel_core import Job, LaunchConfig, LaunchError
from accel_slurm.batch import batch_file
from accel_slurm.config import SlurmConfig
from accel_slurm.hostlist import expand
from accel_slurm.launcher import SlurmLauncher
from accel_slurm.step import Step, address_of
from accel_slurm.task import task

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    "SLURM_NNODES": "7",
}
JOB = Job(
    argv=(), command=(sys.executable, "-m", "accel_core", "launch", "my train.py", "--lr", "1"), nodes=2
)


@pytest.fixture
def variables(monkeypatch):
    """Slurm's variables of this process."""

    def put(**given: str) -> None:
        for name, text in given.items():
            monkeypatch.setenv(name, text)

    return put


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[008-010,3],cpu1", ["gpu008", "gpu009", "gpu010", "gpu3", "cpu1"]),
        ("rack[1-2]node[1,3]-ib", ["rack1node1-ib", "rack1node3-ib", "rack2node1-ib", "rack2node3-ib"]),
        ("a,b[01-02],c", ["a", "b01", "b02", "c"]),
        ("", []),
    ],
)
def test_a_host_list_has_the_names_that_scontrol_shows(text, names):
    assert expand(text) == names


def test_a_task_without_a_launcher_knows_its_place_on_its_node():
    found = task(STEP)

    assert (found.size, found.rank, found.local_rank, found.local_size) == (5, 4, 1, 2)
    listed = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "8,4(x2)", "SLURM_NODEID": "2"}
    assert task(listed).local_size == 4
    assert task({"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}).local_size == 4
    assert task({}) is None


def test_the_batch_script_of_a_job_of_many_tasks_is_one():
    assert task({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).size == 0


def test_a_step_is_read_from_its_own_variables_not_from_the_jobs():
    step = Step.around(STEP)

    assert (step.nodes, step.local_tasks, step.starts_ranks) == (2, 2, True)
    assert address_of(step.node_list) == "127.0.0.1"


def test_a_process_outside_of_a_step_has_no_allocation(monkeypatch):
    for name in STEP:
        monkeypatch.delenv(name, raising=False)

    assert SlurmLauncher(SlurmConfig(), None).allocation(LaunchConfig()) is None


def test_a_task_per_rank_is_a_launcher_of_one_rank(variables):
    variables(**STEP)

    allocation = SlurmLauncher(SlurmConfig(), None).allocation(LaunchConfig())

    assert (allocation.nodes, allocation.node_rank, allocation.processes_per_node) == (5, 4, 1)
    assert (allocation.job_id, allocation.address) == ("slurm-12.3", "127.0.0.1")


def test_a_place_that_the_user_names_is_the_users_to_divide(variables):
    variables(**STEP)

    launch = LaunchConfig(nodes=2, node_rank=1, rendezvous="10.0.0.1:29500")

    assert SlurmLauncher(SlurmConfig(), None).allocation(launch) is None


def test_a_place_that_the_user_names_is_taken_for_the_step(variables):
    variables(**STEP)

    allocation = SlurmLauncher(SlurmConfig(), None).allocation(LaunchConfig(rendezvous="10.0.0.1:29500"))

    assert (allocation.nodes, allocation.node_rank) == (5, 4)


def test_a_step_of_one_task_is_launched_as_without_slurm(variables):
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    variables(**STEP | one)

    assert SlurmLauncher(SlurmConfig(), None).allocation(LaunchConfig(processes_per_node=4)) is None


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
def test_variables_of_a_step_that_are_left_over_are_named(name):
    with pytest.raises(LaunchError, match=f"{name} is not set\nstart this with srun; or, .* torchrun"):
        Step.around({key: text for key, text in STEP.items() if key != name})


@pytest.fixture
def slurms_programs(tmp_path, variables):
    """Make a function that puts Slurm's programs on PATH, each a shell script of these words."""

    def put(**programs: str) -> None:
        for name, words in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
            (tmp_path / name).chmod(0o755)
        variables(PATH=f"{tmp_path}:{os.environ['PATH']}")

    return put


def test_a_rank_hands_over_a_job_whose_launchers_are_none(variables, slurms_programs, tmp_path):
    slurms_programs(sbatch=f"env > {tmp_path}/sent; echo 5")
    variables(RANK="0", WORLD_SIZE="2", ACCEL_KEPT="1")

    assert SlurmLauncher(SlurmConfig(), None).submit(JOB).id == "5"

    sent = dict(line.partition("=")[::2] for line in (tmp_path / "sent").read_text().splitlines())
    assert sent.keys() & {"RANK", "WORLD_SIZE", "ACCEL_KEPT"} == {"ACCEL_KEPT"}


def test_a_job_of_another_cluster_is_not_taken_for_the_one_with_its_number_here(slurms_programs):
    slurms_programs(
        sbatch="echo '5;far'", scontrol='[ "$1" = --clusters=far ] && echo StdOut=/far/slurm-5.out'
    )

    job = SlurmLauncher(SlurmConfig(), None).submit(JOB)

    assert (job.id, job.logs) == ("5", "/far/slurm-5.out")
    assert job.watch == "squeue --clusters=far --jobs 5"
    assert job.cancel == "scancel --clusters=far 5"


def test_an_sbatch_that_tells_no_job_has_sent_none(slurms_programs):
    slurms_programs(sbatch="echo 'sbatch: Job 7 to start at noon' >&2")

    with pytest.raises(LaunchError, match="refused the job: sbatch: Job 7 to start at noon"):
        SlurmLauncher(SlurmConfig(), None).submit(JOB)


def test_a_job_that_failed_while_sbatch_waited_was_not_refused(slurms_programs):
    slurms_programs(sbatch="echo 5; exit 7")  # SBATCH_WAIT

    assert SlurmLauncher(SlurmConfig(), None).submit(JOB).id == "5"


def test_other_tasks_per_node_than_asked_for_are_refused(variables):
    variables(**STEP)

    with pytest.raises(LaunchError, match=r"8 processes per node were asked for, and step 12\.3 .* 2 tasks"):
        SlurmLauncher(SlurmConfig(), None).allocation(LaunchConfig(processes_per_node=8))


def test_a_node_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setenv("PATH", "")

    with pytest.raises(LaunchError, match="does not know 'no-such-node7', the first node of no-such-node"):
        address_of("no-such-node[7-8]")


def test_the_batch_file_is_shell_and_holds_what_was_asked_for(run_command):
    text = batch_file(JOB, SlurmConfig(options="--partition=gpu --time=10", warning_seconds=90))

    assert run_command(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        "--job-name=my-train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@90",
        "--partition=gpu --time=10",
    ]
    assert f"srun {sys.executable} -m accel_core launch 'my train.py' --lr 1 &" in text


def test_a_word_of_an_option_does_not_make_a_comment_of_those_after_it():
    text = batch_file(JOB, SlurmConfig(options=r"--comment=run#3 --chdir='a\b' --time=10"))

    # sbatch takes what follows a plain # for a comment, and unescapes backslashes inside of quotes.
    assert r"#SBATCH '--comment=run#3' '--chdir=a\\b' --time=10" in text.splitlines()


def test_a_job_that_ends_badly_after_the_warning_says_that_it_had_one(run_command):
    text = batch_file(JOB, SlurmConfig(requeue=False)).replace("srun ", "")
    ended = run_command(
        ["bash", "-c", text.replace(shlex.join(JOB.command), "bash -c 'kill -USR1 $PPID; exec sleep 9'")],
        env={**os.environ, "SLURM_JOB_ID": "5"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 128 + signal.SIGUSR1
    assert "job 5 was told to save before the time limit, and ended with code 138" in ended.stderr


@pytest.mark.parametrize(
    ("told", "requeued"), [("PreemptTime=2026-11-23T23:27:38", True), ("PreemptTime=None", False)]
)
def test_a_job_that_ends_because_of_preemption_is_requeued(told, requeued, tmp_path, run_command):
    programs = {"srun": "exit 143", "scontrol": f'[ $1 = show ] && echo "State=RUNNING {told}" || echo "$@"'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    ended = run_command(
        ["bash", "-c", batch_file(JOB, SlurmConfig())],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.stdout == "requeue 5\n") is requeued
    assert ended.returncode == (0 if requeued else 143)


@pytest.mark.parametrize(("said", "requeued"), [("watching", False), ("stopped", True), ("", True)])
def test_a_warned_job_that_had_finished_its_loop_is_not_requeued(said, requeued, tmp_path, run_command):
    programs = {
        "srun": f'trap "" USR1; kill -USR1 $PPID; sleep 1; printf "{said}" > "$ACCEL_STOP_FILE"',
        "scontrol": '[ $1 = show ] || echo "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    ended = run_command(
        ["bash", "-c", batch_file(JOB, SlurmConfig())],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert (ended.stdout == "requeue 5\n") is requeued
    assert not list(tmp_path.glob("tmp.*"))


def test_without_a_warning_a_job_is_not_requeued_by_its_script():
    text = batch_file(JOB, SlurmConfig(warning_seconds=0, requeue=False))

    assert "--no-requeue" in text
    assert "trap" not in text
    assert "scontrol" not in text


@pytest.mark.parametrize(
    "options",
    [
        *("--nodes=3", "-N3", "-n 8", "--signal=USR1@5", "--mem=1G --wrap ls", "--tasks-per-node=4"),
        *("--sig=USR1@5", "--export=NONE", "--test-only", "--wait", "-W"),
    ],
)
def test_an_option_that_is_not_the_users_is_refused(options):
    with pytest.raises(ValueError, match="which accel submit decides; use"):
        SlurmConfig(options=options)


def test_other_options_are_the_users():
    options = "-J name -p gpu -w n1 --nodelist=n1 --no-kill --nice=3 --wait-all-nodes=1 --export-file=f"

    assert SlurmConfig(options=options).options == options


def test_options_that_are_none_are_refused():
    with pytest.raises(ValueError, match="are not one line of options"):
        SlurmConfig(options="gpu")


def test_without_sbatch_nothing_is_sent(tmp_path, run_command):
    script = tmp_path / "train.py"
    script.write_text("")
    ended = run_command(
        [sys.executable, "-m", "accel_core", "submit", "--launcher", "slurm", str(script)],
        env={"PATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "accel: launcher slurm cannot be used: there is no sbatch on PATH, and no job of Slurm around this"
    )


def test_options_of_a_job_that_is_handed_over_start_nothing_here(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    with pytest.raises(LaunchError, match="options of section slurm are of jobs that are handed over"):
        SlurmLauncher(SlurmConfig(options="--partition=gpu"), None).launch(Job(argv=("true",)))
