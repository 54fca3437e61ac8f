"""Nodes with disks of their own: each has all that its ranks need, and all have the same save, or none."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import nodes_job
import pytest
from lookup import home_of, manifest_in, members_of

from accel_testing.commands import ACCEL, clean_environment
from accel_testing.hosts import Host
from accel_testing.patience import patience
from accel_testing.processes import ProcessError

pytestmark = pytest.mark.needs("accel-ddp")

RANKS = {0: ["rank-00000.json", "rank-00000.safetensors"], 1: ["rank-00001.json", "rank-00001.safetensors"]}


def save(run_processes, folder, *values, world=2, per_node=1, **options):
    return run_processes(nodes_job.save, str(folder), per_node, list(values), options, world=world)


def load(run_processes, folder, world=2, per_node=1, **options):
    return run_processes(nodes_job.load, str(folder), per_node, options, world=world)


def inside(folder, node, name="checkpoints/checkpoint_0"):
    return folder / f"node{node}" / name


def test_each_disk_has_all_that_its_ranks_hold_and_the_same_manifest(tmp_path, run_processes):
    save(run_processes, tmp_path, 1)
    for node in (0, 1):
        home = home_of(inside(tmp_path, node))
        assert sorted(path.name for path in home.iterdir()) == sorted(["state.json", *RANKS[node]])
        index = json.loads((home / RANKS[node][0]).read_bytes())
        assert len(index["tensors"]["unit0"]) == 4 + 4 * 3, "replicas are on each disk"
    first, second = (inside(tmp_path, node) for node in (0, 1))
    assert manifest_in(first).read_bytes() == manifest_in(second).read_bytes()
    assert (home_of(first) / "state.json").read_bytes() == (home_of(second) / "state.json").read_bytes()
    manifest = members_of(first)
    assert manifest["domains"] == [[0], [1]]
    assert sorted(manifest["files"]) == sorted(["state.json", *RANKS[0], *RANKS[1]])


@pytest.mark.full
def test_two_ranks_of_a_node_share_its_replicas(tmp_path, run_processes):
    save(run_processes, tmp_path, 1, world=4, per_node=2)
    for node, ranks in [(0, (0, 1)), (1, (2, 3))]:
        indices = [
            json.loads((home_of(inside(tmp_path, node)) / f"rank-{r:05d}.json").read_bytes()) for r in ranks
        ]
        parts = [set(index["tensors"]["unit0"]) for index in indices]
        assert parts[0] & parts[1] == set()
        assert len(parts[0] | parts[1]) == 4 + 4 * 3
    assert {found for found, _ in load(run_processes, tmp_path, world=4, per_node=2)} == {1.0}


@pytest.mark.parametrize("rows", [False, True], ids=["whole", "rows"])
def test_each_node_loads_from_its_own_disk(tmp_path, rows, run_processes):
    save(run_processes, tmp_path, 1, 2, rows=rows, total_limit=1)
    assert [found for found, _ in load(run_processes, tmp_path, rows=rows)] == [2, 2]
    assert [path.name for path in (tmp_path / "node1" / "checkpoints").iterdir()] == ["checkpoint_1"]


@pytest.mark.full
def test_a_part_that_is_on_another_node_is_named_with_the_node(tmp_path, run_processes):
    save(run_processes, tmp_path, 1, rows=True)
    ((said, _),) = load(run_processes, tmp_path, world=1, name="checkpoints/checkpoint_0")
    assert "lacks parts of a tensor of shape [8, 8]" in said
    assert (
        "node 1, with the files of rank(s) 1, wrote is not here\ncopy the files of checkpoint_0 on that"
        in said
    )


@pytest.mark.full
def test_one_node_is_enough_where_it_has_everything(tmp_path, run_processes):
    save(run_processes, tmp_path, 1)
    ((found, _),) = load(run_processes, tmp_path, world=1)
    assert found == 1
    shutil.rmtree(tmp_path / "node0")
    (tmp_path / "node1").rename(tmp_path / "node0")
    ((said, _),) = load(run_processes, tmp_path, world=1, name="checkpoints/checkpoint_0")
    assert "lacks what belongs to rank 0 alone" in said
    assert "node 0, with the files of rank(s) 0" in said


@pytest.mark.full
@pytest.mark.parametrize("rows", [False, True], ids=["whole", "rows"])
def test_the_folders_of_all_nodes_make_one_that_anybody_loads(tmp_path, rows, run_processes):
    save(run_processes, tmp_path, 1, rows=rows)
    shutil.copytree(inside(tmp_path, 1), inside(tmp_path, 0), dirs_exist_ok=True)
    shutil.copytree(tmp_path / "node0", tmp_path / "shared")
    assert [
        found for found, _ in load(run_processes, tmp_path, world=1, shared=True, save_on_each_node=False)
    ] == [1]
    assert [
        found for found, _ in load(run_processes, tmp_path, world=2, shared=True, save_on_each_node=False)
    ] == [1, 1]


@pytest.mark.full
def test_what_is_not_on_all_disks_is_passed_over(tmp_path, run_processes):
    save(run_processes, tmp_path, 1, 2)
    shutil.rmtree(inside(tmp_path, 1, "checkpoints/checkpoint_1"))
    found = load(run_processes, tmp_path)
    assert [value for value, _ in found] == [1, 1]
    assert "passed over: " in found[0][1]
    assert "checkpoint_1 is on node 0, not on 1" in found[0][1]


def test_a_lost_node_is_named(tmp_path, run_processes):
    save(run_processes, tmp_path, 1)
    shutil.rmtree(tmp_path / "node1")
    for said, _ in load(run_processes, tmp_path):
        assert "checkpoint_0 is on node 0, not on 1\ncopy its folder to where it is missing" in said
    for said, _ in load(run_processes, tmp_path, missing_ok=True):
        assert "is on node 0, not on 1" in said, "nothing begins anew beside what one node has"


@pytest.mark.full
def test_disks_with_different_saves_of_one_name_are_not_mixed(tmp_path, run_processes):
    save(run_processes, tmp_path, 1, name="best")
    inside(tmp_path, 0, "best").rename(tmp_path / "kept")
    shutil.rmtree(inside(tmp_path, 1, "best"))
    save(run_processes, tmp_path, 2, name="best")
    shutil.rmtree(inside(tmp_path, 0, "best"))
    (tmp_path / "kept").rename(inside(tmp_path, 0, "best"))
    for said, _ in load(run_processes, tmp_path, name="best"):
        assert "ranks see different checkpoints" in said


@pytest.mark.full
def test_a_disk_that_nodes_share_is_told_apart(tmp_path, run_processes):
    with pytest.raises(
        AssertionError, match="is one folder for several nodes, though project.save_on_each_node"
    ):
        save(run_processes, tmp_path, 1, shared=True)


@pytest.mark.full
def test_disks_that_nodes_do_not_share_are_named_without_the_option(tmp_path, run_processes):
    with pytest.raises(AssertionError, match="made by rank 0, is not visible here") as found:
        save(run_processes, tmp_path, 1, save_on_each_node=False)
    assert "save_on_each_node" in str(found.value)


@pytest.mark.full
@pytest.mark.parametrize("name", ["best", None])
@pytest.mark.parametrize("what", ["manifest_of", "commit"])
def test_what_fails_on_one_disk_leaves_the_same_save_on_both(tmp_path, what, name, run_processes):
    found = run_processes(nodes_job.save_and_fail_on_node_1, str(tmp_path), 1, what, name, world=2)
    for said, loaded, left, again in found:
        assert "rank 1: OSError: [Errno 28] No space left on device" in said
        assert loaded in (1, 2)
        assert again == 3
        assert left == (["best"] if name else ["checkpoint_2"])
    assert found[0][1] == found[1][1]


OTHERS = ("before claim", "before write", "after commit", "before prune")
POINTS = ["before commit", *(pytest.param(point, marks=pytest.mark.full) for point in OTHERS)]


@pytest.mark.parametrize(("node", "name"), [(0, None), (1, "best")])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.by_default
def test_a_node_that_is_killed_in_a_save_leaves_one_that_all_have(tmp_path, point, node, name, run_processes):
    with pytest.raises(ProcessError):
        run_processes(nodes_job.save_and_die, str(tmp_path), node, point, name, world=2)
    # The next job has another id: it knows of the killed one only what is on the disks.
    found = run_processes(
        nodes_job.go_on, str(tmp_path), name, world=2, environment={"TORCHELASTIC_RUN_ID": "next"}
    )
    assert found[0][:2] == found[1][:2]
    assert found[0][0] in (1, 2)
    assert found[0][1] == 3


@pytest.mark.full
def test_a_second_kill_finds_a_save_that_all_have_too(tmp_path, run_processes):
    """After the first, each disk has the save of the other's name under a name of its own only."""
    for point in ("after commit", "before write"):
        with pytest.raises(ProcessError):
            run_processes(nodes_job.save_and_die, str(tmp_path), 0, point, "best", world=2)
    found = run_processes(nodes_job.go_on, str(tmp_path), "best", world=2)
    assert found[0] == found[1]
    assert found[0][1] == 3


# -- two launchers, two disks ---------------------------------------------------------------------

TRAIN = """
import sys
import torch
from accel_core import Accelerator, ProjectConfiguration
project = ProjectConfiguration(
    project_dir="disk", automatic_checkpoint_naming=True, total_limit=2, save_on_each_node=True
)
accelerator = Accelerator(project_config=project)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
found = accelerator.load_state(missing_ok=True)
for _ in range(3):
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state()
if accelerator.is_local_main_process:
    print(found and found.directory.name, accelerator.save_iteration)
accelerator.end_training()
"""


@pytest.mark.full
def test_two_launchers_without_a_shared_disk(tmp_path, make_hosts, start_command):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "disk").mkdir()
    with make_hosts({"c": "10.78.0.1", "d": "10.78.0.2"}) as hosts:
        assert launch(start_command, tmp_path, [*hosts.values()]) == ["None 3", "None 3"]
        for node in (0, 1):
            left = sorted(path.name for path in (tmp_path / f"disk{node}" / "checkpoints").iterdir())
            assert left == ["checkpoint_1", "checkpoint_2"]
            assert (
                len(list(home_of(tmp_path / f"disk{node}" / "checkpoints" / "checkpoint_2").iterdir())) == 3
            )
        assert launch(start_command, tmp_path, [*hosts.values()]) == ["checkpoint_2 6", "checkpoint_2 6"]
    assert list((tmp_path / "disk").iterdir()) == [], "each node mounted its own over it"


def launch(start_command, folder: Path, hosts: list[Host]) -> list[str]:
    """The last line that each launcher printed."""
    started = []
    with ExitStack() as stack:
        for rank in (1, 0):
            disk = folder / f"disk{rank}"
            disk.mkdir(exist_ok=True)
            command = (
                f"mount --bind {disk} {folder / 'disk'} && exec {ACCEL} launch --device cpu -n 1 --nodes 2"
            )
            command += f" --node-rank {rank} --rendezvous {hosts[0].address}:29513 train.py"
            process = start_command(
                hosts[rank].command("unshare", "-m", "bash", "-c", command),
                cwd=folder,
                env=clean_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        told = [process.communicate(timeout=patience(90)) for process in started]
        for process, (_, errors) in zip(started, told, strict=True):
            assert process.returncode == 0, errors
        return [output.splitlines()[-1] for output, _ in told]
