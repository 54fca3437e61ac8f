"""A launcher with an engine behind it: machines that it was given, jobs handed over, what it would do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest

from accel_testing.commands import ACCEL, clean_environment
from accel_testing.patience import patience

LAUNCHER = """
import os
from accel_core import Allocation, LaunchError, SubmittedJob, hooks, implements

class Plugin:
    def __init__(self, config, run):
        pass

    @implements(hooks.allocation)
    def allocation(self, launch):
        if "STABLE" not in os.environ:
            here = launch.launcher != "pony"
            place = {"nodes": launch.nodes, "node_rank": 0, "address": "127.0.0.1"}
            return None if here else Allocation(job_id="7", elsewhere=True, **place)
        if launch.nodes > 2:
            raise LaunchError(f"{launch.nodes} boxes were asked for, and there are 2\\nask for fewer")
        node = int(os.environ["STABLE"])
        return Allocation(job_id=os.environ["STABLE_JOB"], nodes=2, node_rank=node, address="127.0.0.1")

    @implements(hooks.launch)
    def launch(self, job):
        if "STABLE" in os.environ:
            return self.below.launch(job)
        print(f"{job.nodes} x {job.processes_per_node or 'as many as there are'}")
        return 0

    @implements(hooks.preview)
    def preview(self, job, submits):
        kind, worker = "mail" if submits else "call", job.argv[-2:]
        return f"{kind} {job.nodes} x {job.processes_per_node}: {job.command[4:]}, each {worker}"

    @implements(hooks.submit)
    def submit(self, job):
        with open("mail", "w") as mail:
            mail.write("\\n".join(job.command))
        return SubmittedJob(id="7", watch="look 7", cancel="drop 7", logs="stable.log")
"""


@pytest.fixture
def stable(toys, tmp_path):
    """The environment with a launcher `pony`, whose engine says how many boxes there are."""
    (tmp_path / "train.py").write_text("import os\nprint(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE')))")
    return toys(
        "pony",
        "launcher",
        implementation="'toy_stable:Plugin'",
        priority="5",
        modules={"toy_stable": LAUNCHER},
    )


def test_the_machines_of_an_engine_are_taken_without_a_word(stable, tmp_path, start_command):
    job = f"job-{os.getpid()}"
    nodes = [
        start_command(
            [ACCEL, "launch", "-n", "2", "train.py"],
            env=clean_environment({**stable, "STABLE": str(node), "STABLE_JOB": job}),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    ended = [node.communicate(timeout=patience(120)) for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0], ended
    assert sorted("".join(out for out, _ in ended).splitlines()) == ["0 4", "1 4", "2 4", "3 4"]
    told = [
        "".join(line for line in err.splitlines(True) if " waits for node " not in line) for _, err in ended
    ]
    assert told == ["accel 0.1: 2 nodes x 2 = 4 processes, no config file\n", ""]


def test_one_node_that_is_asked_for_among_several_that_are_given_is_an_error(stable, tmp_path, accel):
    environment = {**stable, "STABLE": "0", "STABLE_JOB": "one"}
    ended = accel("launch", "--nodes", "1", "-n", "1", "train.py", environment=environment, cwd=tmp_path)

    assert ended.returncode == 1
    assert "1 node was asked for (flag --nodes), but launcher pony has an allocation of 2" in ended.stderr
    assert not ended.stdout


def test_without_an_engine_auto_is_torchrun(stable, tmp_path, accel):
    ended = accel("launch", "-n", "1", "train.py", environment=stable, cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr


def test_a_rank_launches_on_its_own_machine(stable, tmp_path, accel):
    within = {**stable, "STABLE": "1", "STABLE_JOB": "j", "RANK": "1", "WORLD_SIZE": "2"}

    ended = accel("launch", "-n", "1", "train.py", environment=within, cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr
    assert "RANK=1 and WORLD_SIZE=2 are set, as in a rank, so this launch trains alone" in ended.stderr

    started = {**within, "TORCHELASTIC_RUN_ID": "7"}
    ended = accel("launch", "-n", "1", "train.py", environment=started, cwd=tmp_path)

    assert "are set" not in ended.stderr


@pytest.mark.parametrize(("nodes", "alone"), [("2", True), ("1:4", True), ("1", False)])
def test_nodes_that_only_torchrun_reads_are_told(stable, tmp_path, nodes, alone, accel):
    ended = accel("launch", "-n", "1", "train.py", environment={**stable, "PET_NNODES": nodes}, cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr
    assert (f"PET_NNODES={nodes} is set, which only torchrun reads" in ended.stderr) == alone


def test_a_size_that_a_batch_script_exports_does_not_make_a_rank(stable, tmp_path, accel):
    within = {**stable, "STABLE": "0", "STABLE_JOB": "j", "WORLD_SIZE": "16"}

    shown = accel("launch", "--dry-run", "-n", "1", "train.py", environment=within, cwd=tmp_path)

    assert shown.stdout.startswith("accel 0.1: 2 nodes x 1 = 2 processes, "), shown.stderr


def test_an_allocation_that_is_too_small_is_an_error_before_any_worker(stable, tmp_path, accel):
    within = {**stable, "STABLE": "0", "STABLE_JOB": "j"}

    ended = accel("launch", "--nodes", "3", "train.py", environment=within, cwd=tmp_path)

    assert ended.returncode == 1
    assert ended.stderr == "accel: 3 boxes were asked for, and there are 2\nask for fewer\n"


def test_submit_hands_over_accel_launch_with_all_its_flags(stable, tmp_path, accel, run_command):
    (tmp_path / "accel.yaml").write_text("mixed_precision: bf16\n")
    words = ("--launcher", "pony", "--nodes", "2", "--compile.backend", "eager", "train.py", "--lr", "1")

    ended = accel("submit", *words, environment=stable, cwd=tmp_path)

    assert ended.stdout == "job: 7\nwatch: look 7\ncancel: drop 7\nlogs: stable.log\n", ended.stderr
    command = (tmp_path / "mail").read_text().split("\n")
    assert command[1:5] == ["-m", "accel_core", "launch", f"--config={tmp_path}/accel.yaml"]
    assert sorted(command[5:-3]) == ["--compile.backend=eager", "--launch.launcher=pony", "--launch.nodes=2"]
    assert command[-3:] == ["train.py", "--lr", "1"]
    shown = run_command(
        [*command[:4], "--dry-run", *command[4:]],
        env=clean_environment(stable),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2 nodes x auto = auto processes, mixed precision bf16" in shown.stdout


def test_a_dry_run_shows_what_the_launcher_would_do_and_does_nothing(stable, tmp_path, accel):
    words = ("--dry-run", "--launcher", "pony", "-n", "3", "train.py")

    launched = accel("launch", *words, environment=stable, cwd=tmp_path)
    submitted = accel("submit", *words, environment=stable, cwd=tmp_path)

    assert "\ncall 1 x 3: " in launched.stdout
    assert "\nmail 1 x 3: " in submitted.stdout
    assert not (tmp_path / "mail").exists()


def test_the_preview_of_a_launch_has_the_command_of_a_worker(stable, tmp_path, accel):
    words = ("--dry-run", "--launcher", "pony", "-n", "3", "train.py", "--lr=1")

    launched = accel("launch", *words, environment=stable, cwd=tmp_path)
    submitted = accel("submit", *words, environment=stable, cwd=tmp_path)

    assert ", each ('train.py', '--lr=1')" in launched.stdout
    assert ", each ()" in submitted.stdout  # such a job runs `accel launch`


def test_the_devices_of_this_machine_do_not_count_where_workers_start_elsewhere(
    toys, stable, tmp_path, accel
):
    source = "def visible_devices(config): return 0"
    offers = "{'process_per_device'}"
    toys(
        "mule",
        "device",
        visible_devices="'toy_mule_launch:visible_devices'",
        offers=offers,
        modules={"toy_mule_launch": source},
    )
    words = ("--launcher", "pony", "--device", "mule", "--nodes", "2")

    counted = accel("launch", *words, "train.py", environment=stable, cwd=tmp_path)
    named = accel("launch", *words, "-n", "8", "train.py", environment=stable, cwd=tmp_path)

    assert counted.stdout == "2 x as many as there are\n", counted.stderr
    assert "2 nodes x auto = auto processes, device mule" in counted.stderr
    assert named.stdout == "2 x 8\n", named.stderr


def test_a_dry_run_counts_the_processes_as_the_launch_would(stable, tmp_path, accel):
    words = ("--dry-run", "--launcher", "pony", "--device", "cpu", "train.py")

    assert "\ncall 1 x 1: " in accel("launch", *words, environment=stable, cwd=tmp_path).stdout


def test_a_job_that_is_handed_over_has_no_number_of_a_node(stable, tmp_path, accel):
    words = ("--launcher", "pony", "--nodes", "2", "--node-rank", "1", "train.py")

    ended = accel("submit", *words, environment=stable, cwd=tmp_path)

    assert ended.returncode == 2
    assert "launch.node_rank 1 was asked for" in ended.stderr
    assert not (tmp_path / "mail").exists()


def test_a_launcher_that_hands_nothing_over_says_so(tmp_path, accel):
    (tmp_path / "train.py").write_text("")

    ended = accel("submit", "train.py", cwd=tmp_path)

    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "accel: launcher auto starts workers on this machine, and cannot submit a job\n"
    )


@pytest.mark.full
def test_a_warning_to_all_processes_is_the_workers_sigterm_and_leaves_them_all_the_time(
    tmp_path, start_command
):
    (tmp_path / "train.py").write_text(
        "import os, signal, time\n"
        "told = []\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "while not told: time.sleep(0.05)\n"
        "time.sleep(2)\n"
        "print('saved', flush=True)\n"
    )
    process = start_command(
        [ACCEL, "launch", "-n", "2", "--device", "cpu", "train.py"],
        env=clean_environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + patience(60)
    while len(list(tmp_path.glob("ready*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)

    process.send_signal(signal.SIGUSR1)

    assert process.communicate(timeout=patience(60))[0] == "saved\nsaved\n"
    assert process.returncode == 0


@pytest.mark.full
def test_ranks_that_a_warning_ends_do_not_start_again_unwarned(tmp_path, start_command):
    (tmp_path / "train.py").write_text(
        "import os, time\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\ntime.sleep(60)\n"
    )
    process = _started(start_command, "--max-restarts", "3", cwd=tmp_path)
    assert process.stdout.readline() == "0\n"

    process.send_signal(signal.SIGUSR1)

    assert process.communicate(timeout=patience(50))[0] == ""
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
def test_ranks_hear_of_a_warning_that_came_while_their_node_waited_for_another(tmp_path, start_command):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    meet = ("--nodes", "2", "--rendezvous", place, "--node-rank")
    first = _started(start_command, *meet, "0", cwd=tmp_path, stderr=subprocess.PIPE)
    while "waits for node 1" not in first.stderr.readline():
        assert first.poll() is None

    first.send_signal(signal.SIGUSR1)
    second = _started(start_command, *meet, "1", cwd=tmp_path)

    for process in (first, second):
        process.communicate(timeout=patience(50))
        assert process.returncode == 128 + signal.SIGTERM


def _started(start_command, *flags: str, **given: object) -> subprocess.Popen[str]:
    command = [ACCEL, "launch", "-n", "1", "--device", "cpu", *flags, "train.py"]
    return start_command(command, env=clean_environment(), text=True, **{"stdout": subprocess.PIPE, **given})
