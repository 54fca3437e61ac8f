"""What DeepSpeed saved at any stage goes on in accel-core, and nothing found in it is run."""

from __future__ import annotations

import shutil
from pathlib import Path

import convert_deepspeed_jobs as jobs
import pytest
import torch
from click.testing import CliRunner
from opened import read, tensors_of

from accel_checkpoint_tools import deepspeed
from accel_checkpoint_tools.contents import Contents
from accel_core import CheckpointError
from accel_core.cli.group import accel

pytestmark = pytest.mark.timeout(600)

BF16 = {"bf16": {"enabled": True}}
CONFIGS = {
    "none": {},
    "1, bf16": {"zero_optimization": {"stage": 1}, **BF16},
    "1, bf16, gradients in fp32": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
    "2": {"zero_optimization": {"stage": 2}},
    "3": {"zero_optimization": {"stage": 3}},
    "3, bf16, sub-groups": {"zero_optimization": {"stage": 3, "sub_group_size": 30}, **BF16},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, run_processes):
    """Config -> (its folder, what DeepSpeed says it has saved, losses that followed); each saved once."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("saved")
    done = {}

    def save(name):
        if name not in done:
            target = folder / str(list(CONFIGS).index(name))
            found = run_processes(jobs.deepspeed_saves, str(target), CONFIGS[name], world=2, timeout=400)
            done[name] = (target, *found[0])
        return done[name]

    return save


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, run_processes):
    folder = tmp_path_factory.mktemp("fresh") / "checkpoint"
    run_processes(jobs.core_is_fresh, str(folder), world=1)
    return folder


def imported(folder, fresh):
    with Contents.open(fresh) as contents:
        left_out = deepspeed.read(folder, contents, "unit0")
        return by_key(read(contents)), left_out


def by_key(tensors):
    return {key: tensor for (_, key), tensor in tensors.items()}


def assert_same(found, told):
    assert told
    assert [key for key, tensor in told.items() if not torch.equal(found[key], tensor)] == []
    assert {found[key].item() for key in found if key.endswith("/step")} == {jobs.STEPS}


@pytest.mark.parametrize("name", ["1, bf16", "1, bf16, gradients in fp32", "3, bf16, sub-groups"])
def test_masters_and_moments_are_put_together_from_all_ranks(saved, fresh, name):
    folder, told, _ = saved(name)

    found, left_out = imported(folder, fresh)

    assert_same(found, told)
    assert found["model/seen"].tolist() == [0, 0, 0]
    assert torch.equal(found["model/fixed.weight"].float(), jobs.Net(0).fixed.weight.bfloat16().float())
    assert left_out == ["what the script gave save_checkpoint as client_state: epoch"]


def test_steps_that_only_groups_count_are_kept(saved, fresh, tmp_path):
    folder, told, _ = saved("1, bf16")
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    for file in theirs.rglob("*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        inner = content["optimizer_state_dict"]["base_optimizer_state"]
        for state in inner["state"].values():
            state.pop("step")
        for group in inner["param_groups"]:
            group["step"] = jobs.STEPS
        torch.save(content, file)
    with Contents.open(fresh) as contents:
        deepspeed.read(theirs, contents, "unit0")
        assert_same(by_key(read(contents)), told)
    assert contents.state["units"]["unit0"]["optimizers"][0]["groups"][0]["step"] == jobs.STEPS


@pytest.mark.parametrize("name", ["1, bf16", "3, bf16, sub-groups"])
def test_universal_checkpoints_are_read(saved, fresh, name, tmp_path, run_processes):
    folder, told, _ = saved(name)
    run_processes(jobs.to_universal, str(folder), str(tmp_path / "universal"), world=1, timeout=400)

    found, _ = imported(tmp_path / "universal", fresh)

    assert_same(found, told)


@pytest.mark.parametrize("name", ["none", "2", "3"])
def test_training_goes_on_with_the_same_losses(saved, name, tmp_path, run_processes):
    folder, _, expected = saved(name)

    ((found, _),) = run_processes(jobs.core_imports, str(folder), str(tmp_path / "imported"), world=1)

    assert found == expected


@pytest.mark.parametrize(("moves", "expected"), [(False, 64.0), (True, 1.0)])
def test_a_loss_scale_is_imported_where_it_moved(saved, fresh, tmp_path, moves, expected):
    folder = tmp_path / "theirs"
    shutil.copytree(saved("2")[0], folder)
    for file in folder.glob("global_step3/*optim_states.pt"):
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"]["loss_scaler"].dynamic = moves
        torch.save(content, file)
    entries = {"loss_scale": {"cur_scale": 64.0}, "counters": {"global_steps": 0}}
    with Contents.open(fresh) as contents:
        contents.ranks[0]["plugins"] = {"unit0": {"replicated": {"deepspeed": entries}}}

        deepspeed.read(folder, contents, "unit0")

    assert entries == {"loss_scale": {"cur_scale": expected}, "counters": {"global_steps": jobs.STEPS}}


def test_the_command_imports(saved, fresh, tmp_path):
    folder, told, _ = saved("1, bf16")
    words = ["import", "--format", "deepspeed", folder, tmp_path / "new", "--like", fresh]

    ended = CliRunner().invoke(accel, ["checkpoint", *map(str, words)], catch_exceptions=False)

    assert ended.exit_code == 0, ended.output
    assert_same(by_key(tensors_of(tmp_path / "new")), told)


def test_code_in_a_file_is_refused_and_not_run(saved, fresh, tmp_path, monkeypatch):
    folder, _, _ = saved("none")
    monkeypatch.chdir(tmp_path)
    poisoned = tmp_path / "poisoned"
    poisoned.mkdir()
    (file,) = folder.glob("global_step3/*.pt")
    (poisoned / file.name).write_bytes(file.read_bytes())
    jobs.poison(poisoned / file.name)

    with pytest.raises(CheckpointError, match="not done here"):
        imported(poisoned, fresh)
    assert not Path("harmed").exists()


@pytest.mark.parametrize("name", ["layer_01-model_00-model_states.pt", "mp_rank_01_model_states.pt"])
def test_parts_of_models_are_refused(fresh, tmp_path, name):
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    (tmp_path / name).touch()

    with pytest.raises(CheckpointError, match=r"holds a part of the model's layers or experts"):
        imported(tmp_path, fresh)


def test_a_folder_of_something_else_is_named(fresh, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no \*model_states\.pt"):
        imported(tmp_path, fresh)


def test_a_layout_that_is_not_known_is_said(saved, fresh, tmp_path):
    folder, _, _ = saved("2")
    for file in folder.glob("global_step3/*.pt"):
        content = torch.load(file, weights_only=False)
        if "optimizer_state_dict" in content:
            content["optimizer_state_dict"]["base_optimizer_state"] = []
        torch.save(content, tmp_path / file.name)

    with pytest.raises(CheckpointError, match="ds_to_universal"):
        imported(tmp_path, fresh)
