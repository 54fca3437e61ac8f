"""Pure parts, without a cluster: places, the request to the job server, what is refused."""

from __future__ import annotations

import json
import os
import shlex
import sys

import pytest

from accel_core import Job, LaunchConfig, LaunchError
from accel_ray.config import RayConfig
from accel_ray.jobs import relocated, request, submit
from accel_ray.launcher import RayLauncher
from accel_ray.node import Node
from accel_ray.place import JOB, PLACE, Place

PLACED = Place(job="ray-7-1", nodes=2, node=1, address="10.0.0.1", processes=4)


def job(*flags: str) -> Job:
    return Job(
        argv=(), command=("/here/python", "-m", "accel_core", "launch", *flags, "my train.py"), nodes=2
    )


def test_an_actor_gives_a_node_its_place(monkeypatch):
    monkeypatch.setenv(PLACE, PLACED.told())

    counted = RayLauncher(RayConfig(), None).allocation(LaunchConfig())
    named = RayLauncher(RayConfig(), None).allocation(LaunchConfig(processes_per_node=4))

    assert (counted.job_id, counted.nodes, counted.node_rank, counted.address) == (
        "ray-7-1",
        2,
        1,
        "10.0.0.1",
    )
    assert (counted.processes_per_node, named.processes_per_node) == (4, None)


def test_a_process_outside_of_ray_has_no_allocation(monkeypatch):
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.delenv(JOB, raising=False)

    assert RayLauncher(RayConfig(), None).allocation(LaunchConfig()) is None


def test_a_cluster_that_is_named_has_devices_of_its_own(monkeypatch):
    """The head that launches may have none, or other ones."""
    monkeypatch.delenv(PLACE, raising=False)
    monkeypatch.delenv(JOB, raising=False)

    found = RayLauncher(RayConfig(), None).allocation(LaunchConfig(launcher="ray", nodes=2))

    assert (found.elsewhere, found.nodes, found.processes_per_node) == (True, 2, None)


def test_the_command_of_a_job_starts_all_its_nodes_unless_the_user_divides_it(monkeypatch):
    monkeypatch.setenv(JOB, json.dumps({"metadata": {"job_submission_id": "raysubmit_7"}}))
    launcher = RayLauncher(RayConfig(), None)

    all_nodes = launcher.allocation(LaunchConfig(nodes=2, processes_per_node=2))

    assert (all_nodes.job_id, all_nodes.nodes, all_nodes.node_rank) == ("ray-raysubmit_7", 2, 0)
    assert all_nodes.elsewhere
    assert launcher.allocation(LaunchConfig(nodes=2, rendezvous="10.0.0.1:29500")) is None


@pytest.mark.parametrize("told", [{}, {"metadata": None}, {"metadata": {}}])
def test_a_job_may_tell_no_metadata(monkeypatch, told):
    monkeypatch.setenv(JOB, json.dumps(told))

    assert RayLauncher(RayConfig(), None).allocation(LaunchConfig(nodes=2)).job_id.startswith("ray-")


def test_a_request_starts_in_the_folder_that_all_nodes_share(monkeypatch, tmp_path):
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.chdir(folder)

    sent = request(job(f"--config={folder}/accel.yaml"), RayConfig())

    assert sent["entrypoint"] == (
        f"cd {shlex.quote(str(folder))} && exec python -m accel_core launch"
        f" {shlex.quote(f'--config={folder}/accel.yaml')} 'my train.py'"
    )
    assert "working_dir" not in sent["runtime_env"]


def test_a_request_names_the_config_where_the_sent_folder_will_be(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL__DEVICE", "cpu")
    monkeypatch.setenv("ACCEL_CONFIG", str(tmp_path / "accel.yaml"))

    sent = request(job(f"--config={tmp_path}/accel.yaml"), RayConfig(working_dir="."))

    assert sent["entrypoint"] == "python -m accel_core launch --config=accel.yaml 'my train.py'"
    assert sent["runtime_env"]["working_dir"] == str(tmp_path)
    assert sent["runtime_env"]["env_vars"]["ACCEL__DEVICE"] == "cpu"
    assert "ACCEL_CONFIG" not in sent["runtime_env"]["env_vars"]


def test_inside_of_a_job_the_config_is_named_in_the_folder_that_was_sent(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(JOB, json.dumps({"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}))

    words = relocated(job(f"--config={tmp_path}/accel.yaml"), RayConfig(working_dir="not/here"))

    assert words == ["-m", "accel_core", "launch", "--config=accel.yaml", "my train.py"]


def test_a_flag_of_the_script_stays_as_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = Job(
        argv=(), command=("python", "-m", "accel_core", "launch", "train.py", f"--config={tmp_path}/my.yaml")
    )

    assert relocated(asked, RayConfig(working_dir="."))[-1] == f"--config={tmp_path}/my.yaml"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (RayConfig(address="head:6379"), "head:6379 is not the address of a job server of Ray\nname it with"),
        (RayConfig(address="http://127.0.0.1:1"), "the job server of Ray at http://127.0.0.1:1 did not take"),
        (RayConfig(working_dir="no/such"), "ray.working_dir no/such is not a folder\nname another"),
    ],
    ids=["cluster", "nobody", "folder"],
)
def test_a_job_that_cannot_be_handed_over_is_one_error(monkeypatch, config, found):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    with pytest.raises(LaunchError, match=found):
        submit(job(), config)


def test_a_dry_run_shows_the_request_and_sends_nothing(tmp_path, run_command):
    (tmp_path / "train.py").write_text("")
    words = ("submit", "--dry-run", "--launcher", "ray", "--ray.working-dir", ".", "-n", "2", "train.py")
    shown = run_command(
        [sys.executable, "-m", "accel_core", *words],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    sent = json.loads(shown[shown.index("{\n") :])
    assert sent["runtime_env"]["working_dir"] == str(tmp_path)
    assert "--launch.processes_per_node=2" in sent["entrypoint"]


def test_output_of_a_node_comes_in_whole_lines_and_ends_with_the_exit_code(tmp_path, run_command):
    program = "import sys; print('a', 'b'); sys.stderr.write('no end'); sys.exit(7)"

    *lines, code = Node().run(("-c", program), {}, str(tmp_path))

    assert code == 7
    assert sorted(line for part in lines for line in part) == [("stderr", b"no end"), ("stdout", b"a b\n")]


def test_a_node_without_the_folder_says_so(tmp_path):
    lines, code = Node().run(("-c", ""), {}, str(tmp_path / "none"))

    assert code == 1
    assert lines[0][1].endswith(b"share it, or send a folder with --ray.working-dir .\n")


def test_a_command_of_a_node_is_a_job_of_its_own(tmp_path, monkeypatch, run_command):
    others = {"RANK", "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK"}
    for name in others:
        monkeypatch.setenv(name, "3")
    program = f"import os; print({others} & {{*os.environ}})"

    lines, _ = Node().run(("-c", program), {}, str(tmp_path))

    assert lines == [("stdout", b"set()\n")]
