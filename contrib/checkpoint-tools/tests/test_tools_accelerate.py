"""Accelerate 1.x goes on where accel-core stopped, and the other way round; nothing found in files is run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import convert_jobs as jobs
import pytest
import torch
from click.testing import CliRunner
from opened import tensor, tensors_of

from accel_checkpoint_tools import accelerate, load_accelerate, load_dcp
from accel_checkpoint_tools.contents import Contents, Source
from accel_core import Accelerator, CheckpointError
from accel_core.cli.group import accel


def run(run_processes, job, *folders, world=1, **options):
    return run_processes(jobs.do, job.__name__, [*map(str, folders)], options, world=world, timeout=90)[-1]


def command(*words):
    ended = CliRunner().invoke(accel, ["checkpoint", *map(str, words)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.fixture(scope="module")
def installed():
    pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, installed, run_processes):
    """A folder of Accelerate's, what followed there, and a checkpoint of the same script now."""
    folder = tmp_path_factory.mktemp("saved")
    expected = run(run_processes, jobs.accelerate_saves, folder / "theirs")
    run(run_processes, jobs.core_is_fresh, folder / "fresh")
    return folder, expected


@pytest.fixture
def theirs(saved, tmp_path):
    return shutil.copytree(saved[0] / "theirs", tmp_path / "theirs")


@pytest.fixture
def contents(saved):
    with Contents.open(saved[0] / "fresh") as opened:
        yield opened


# -- there and back ------------------------------------------------------------------------------


def test_the_state_of_plugins_is_named_as_left_out_both_ways(theirs, contents, tmp_path):
    contents.tensors["unit0", "plugins/average/weights/norm.bias"] = Source.of(torch.ones(6))

    assert "the state of plugin average" in accelerate.write(contents, tmp_path)
    assert "the state of plugin average, which begins anew" in accelerate.read(theirs, contents)
    assert ("unit0", "plugins/average/weights/norm.bias") not in contents.tensors


def test_a_script_goes_on_where_accelerate_stopped(saved, tmp_path, run_processes):
    folder, expected = saved

    found, left_out, beside = run(run_processes, jobs.core_imports, folder / "theirs", tmp_path / "imported")

    assert found == expected
    assert left_out == []
    assert beside == ["imported"]


def test_models_and_optimizers_of_one_shape_keep_the_order_of_prepare_both_ways(
    installed, tmp_path, run_processes
):
    expected = run(run_processes, jobs.accelerate_saves_twins, tmp_path / "theirs")

    found, left_out = run(
        run_processes,
        jobs.core_imports_twins,
        tmp_path / "theirs",
        tmp_path / "imported",
        tmp_path / "exported",
    )

    assert found == expected
    assert left_out == []
    assert run(run_processes, jobs.accelerate_loads_twins, tmp_path / "exported") == expected


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("alone", [False, True])
def test_several_ranks_go_on_each_with_its_random_numbers(installed, tmp_path, alone, run_processes):
    expected = run(run_processes, jobs.accelerate_saves, tmp_path / "theirs", world=2)

    folders = tmp_path / "theirs", tmp_path / "imported"
    found, left_out, _ = run(run_processes, jobs.core_imports, *folders, world=2, alone=alone)

    assert found == expected
    assert len(left_out) == 1
    assert "steps schedulers once a process" in left_out[0]


def test_the_command_imports_without_the_script(saved, tmp_path, run_processes):
    folder, expected = saved

    folders = folder / "theirs", tmp_path / "new", "--like", folder / "fresh"
    command("import", "--format", "accelerate", *folders)

    assert run(run_processes, jobs.core_loads, tmp_path / "new") == expected


def test_two_models_and_torchs_own_files_are_imported(installed, tmp_path, run_processes):
    expected = run(run_processes, jobs.accelerate_saves, tmp_path / "theirs", two=True, safe=False)

    found, _, _ = run(run_processes, jobs.core_imports, tmp_path / "theirs", tmp_path / "imported", two=True)

    assert (tmp_path / "theirs" / "pytorch_model_1.bin").exists()
    assert found == expected


@pytest.mark.parametrize("two", [False, True], ids=["one model", "two"])
def test_accelerate_goes_on_where_a_script_stopped(installed, tmp_path, two, run_processes):
    expected = run(run_processes, jobs.core_saves, tmp_path / "ours", two=two)

    command("export", "--format", "accelerate", tmp_path / "ours", tmp_path / "theirs")

    assert run(run_processes, jobs.accelerate_loads, tmp_path / "theirs", two=two) == expected


def test_the_readmes_commands_run(saved, tmp_path, monkeypatch, run_processes):
    folder, expected = saved
    shutil.copytree(folder / "theirs", tmp_path / "old")
    shutil.copytree(folder / "fresh", tmp_path / "fresh")
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")

    for line in re.search(r"```sh\n(.*?)```", readme, re.DOTALL)[1].splitlines():
        command(*line.split()[2:])

    assert run(run_processes, jobs.core_loads, tmp_path / "new") == expected
    one, other = (tensors_of(tmp_path / name) for name in ("new", "newer"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


# -- what does not fit ---------------------------------------------------------------------------


def test_a_script_that_does_not_fit_keeps_what_it_had(theirs, tmp_path, run_processes):
    (theirs / "scheduler.bin").unlink()

    said, unchanged, left = run(
        run_processes, jobs.core_imports_what_does_not_fit, theirs, tmp_path / "here" / "imported"
    )

    assert "has 0 schedulers, this run 1\nprepare and register what was there" in said
    assert unchanged
    assert left == []


def test_what_is_not_understood_is_named_as_left_out(theirs, contents):
    (theirs / "dl_state_dict.bin").write_bytes(b"")
    (theirs / "random_states_1.pkl").write_bytes(b"")

    left_out = accelerate.read(theirs, contents)

    assert left_out[:-1] == [
        str(theirs / name) for name in ("dl_state_dict.bin", "random_states_0.pkl", "random_states_1.pkl")
    ]
    assert "steps schedulers once a process" in left_out[-1]


def test_a_scaler_goes_where_one_is(theirs, contents):
    torch.save({"scale": 4.0}, theirs / "scaler.pt")
    contents.ranks[0]["plugins"] = {"unit0": {"replicated": {"fp16": {"scaler": {"scale": 1.0}}}}}

    assert accelerate.read(theirs, contents) == []

    assert contents.ranks[0]["plugins"]["unit0"]["replicated"]["fp16"]["scaler"] == {"scale": 4.0}


def test_an_optimizer_with_other_groups_is_refused(theirs, contents):
    optimizer = torch.load(theirs / "optimizer.bin")
    optimizer["param_groups"][0]["params"].pop()
    torch.save(optimizer, theirs / "optimizer.bin")

    with pytest.raises(CheckpointError, match=r"its groups have \[2, 2\] parameters, here \[3, 2\]"):
        accelerate.read(theirs, contents)


def test_parameters_in_another_order_are_seen_by_their_shapes(theirs, contents):
    groups = contents.state["units"]["unit0"]["optimizers"][0]["groups"]
    groups[1]["params"].reverse()

    with pytest.raises(CheckpointError, match="exp_avg of .* has shape .*\nthe order of parameters is not"):
        accelerate.read(theirs, contents)


def test_weights_of_another_model_are_named(theirs, contents):
    contents.tensors["unit0", "model/more"] = contents.tensors.pop(("unit0", "model/norm.weight"))

    with pytest.raises(CheckpointError, match="more is not in it; norm.weight is in it, but not in this run"):
        accelerate.read(theirs, contents)


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ("model.safetensors", "neither model.safetensors nor pytorch_model.bin"),
        ("optimizer.bin", "0 optimizers, this run 1"),
        ("scheduler.bin", "0 schedulers, this run 1"),
        ("custom_checkpoint_0.pkl", "0 registered objects, this run 1"),
    ],
)
def test_a_file_that_lacks_is_named(theirs, contents, lacking, said):
    (theirs / lacking).unlink()

    with pytest.raises(CheckpointError, match=said):
        accelerate.read(theirs, contents)


def test_a_folder_of_a_sharded_strategy_is_pointed_elsewhere(theirs, contents):
    (theirs / "pytorch_model_fsdp_0").mkdir()

    with pytest.raises(CheckpointError, match="a sharded strategy saved this\nwhere .* --format dcp"):
        accelerate.read(theirs, contents)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_0_rank1.bin"])
def test_a_folder_of_the_parts_of_ranks_says_how_to_save_it_anew(theirs, contents, name):
    (theirs / "model.safetensors").rename(theirs / name)

    with pytest.raises(CheckpointError, match=rf"{name}.*\nload it with Accelerate, .* FULL_STATE_DICT"):
        accelerate.read(theirs, contents)


class Code:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


@pytest.mark.parametrize(
    "name", ["optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl", "random_states_0.pkl"]
)
def test_code_in_a_file_is_refused_and_not_run(theirs, contents, name, tmp_path):
    torch.save({"state": Code(tmp_path / "ran")}, theirs / name)

    with pytest.raises(CheckpointError, match=f"{name} cannot be read as plain data"):
        accelerate.read(theirs, contents)

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "scheduler.bin"])
def test_a_damaged_file_is_named(theirs, contents, name):
    content = (theirs / name).read_bytes()
    (theirs / name).write_bytes(content[: len(content) // 2])

    with pytest.raises(CheckpointError, match=name):
        accelerate.read(theirs, contents)


def test_an_export_replaces_nothing(saved, tmp_path):
    (tmp_path / "there").mkdir()

    with pytest.raises(CheckpointError, match="exists\nexport to another folder"):
        command("export", "--format", "accelerate", saved[0] / "fresh", tmp_path / "there")


def test_one_tensor_of_all_parameters_is_read_whatever_the_first_parameter_is(tmp_path):
    accelerator, module = (
        Accelerator(device="cpu"),
        torch.nn.Sequential(torch.nn.PReLU(), torch.nn.Linear(2, 1)),
    )
    model, optimizer = accelerator.prepare(module, torch.optim.LBFGS(module.parameters(), max_iter=3))

    def loss():
        optimizer.zero_grad()
        found = model(torch.tensor([[-1.0, 1.0]])).square().sum()
        accelerator.backward(found)
        return found

    optimizer.step(loss)
    optimizer.zero_grad()
    accelerator.save_state(tmp_path / "here")
    accelerator.end_training()
    with Contents.open(tmp_path / "here") as contents:
        direction = tensor(contents, "unit0", "optimizer/0.weight/d")
        (tmp_path / "there").mkdir()
        accelerate.write(contents, tmp_path / "there")
        del contents.tensors["unit0", "optimizer/0.weight/d"]
        assert accelerate.read(tmp_path / "there", contents) == []
        assert torch.equal(tensor(contents, "unit0", "optimizer/0.weight/d"), direction)


# -- sharded strategies --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def sharded(request, tmp_path_factory, installed, run_processes):
    """What Accelerate's FSDP code has written of two ranks, and what was in it."""
    folder = tmp_path_factory.mktemp("sharded") / "saved"
    found = run_processes(jobs.save_with_accelerates_fsdp, str(folder), request.param, world=2, timeout=90)
    return folder, found[0]


@pytest.fixture
def trained():
    """A run whose optimizer has moments of its own."""
    accelerator = Accelerator(device="cpu")
    module = jobs.sharded_network()
    inner = torch.optim.AdamW(module.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(module, inner)
    accelerator.backward(model(torch.ones(1, 6)).sum())
    optimizer.step()
    optimizer.zero_grad()
    yield accelerator, module, inner
    accelerator.end_training()


def test_weights_and_moments_of_accelerates_fsdp_come_together(sharded, trained, tmp_path):
    folder, expected = sharded
    accelerator, module, inner = trained
    assert load_accelerate(accelerator, folder, tmp_path / "into") == []
    found = {
        name: [each.tolist(), inner.state[each]["exp_avg"].tolist(), inner.state[each]["step"].item()]
        for name, each in module.named_parameters()
    }
    assert found == expected
    assert inner.param_groups[0]["lr"] == 0.02


def test_weights_of_accelerates_fsdp_alone_are_not_stepped_with_moments_of_this_run(
    sharded, trained, tmp_path
):
    folder, expected = sharded
    if not (folder / "pytorch_model_fsdp_0").exists():
        pytest.skip("this form has no folder of weights")
    accelerator, module, inner = trained
    left = load_dcp(accelerator, folder / "pytorch_model_fsdp_0", tmp_path / "into")
    assert "optimizer's state" in left[0]
    assert "begins anew" in left[0]
    assert {name: each.tolist() for name, each in module.named_parameters()} == {
        name: weight for name, (weight, _, _) in expected.items()
    }
    assert not any(inner.state.get(each) for each in module.parameters())


def test_weights_of_accelerates_fsdp_without_its_optimizer_are_refused(sharded, trained, tmp_path):
    folder = shutil.copytree(sharded[0], tmp_path / "copy")
    for each in (folder / "optimizer.bin", folder / "optimizer_0"):
        if each.exists():
            each.rename(tmp_path / each.name)
    with pytest.raises(CheckpointError, match="has 0 optimizers, this run 1"):
        load_accelerate(trained[0], folder, tmp_path / "into")
