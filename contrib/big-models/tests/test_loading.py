"""Checkpoints of several formats are loaded straight from file, or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from big_model_problems import Model, ids, model, shards
from safetensors.torch import _SIZE, save_file

from accel_big_models import arranging, empty_weights, load, plan, weights_of
from accel_big_models.planning import plan_from_map
from accel_core import Accelerator, CheckpointError, ConfigError

WRITES_COMPLEX = pytest.mark.skipif(
    torch.complex64 not in _SIZE, reason="this safetensors writes no complex numbers"
)


def empty() -> Model:
    with empty_weights():
        return Model()


@pytest.fixture
def want():
    return model()(ids())


def test_a_folder_of_shards_is_mapped_and_nothing_is_copied(tmp_path, want):
    folder = shards(tmp_path / "c", model())
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    loaded = load(empty(), folder)

    assert torch.equal(loaded(ids()), want)
    assert loaded.head.weight is loaded.embedding.weight
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    maps = Path("/proc/self/maps").read_text()
    assert str(folder / "model-00001-of-00003.safetensors") in maps
    assert not loaded._forward_pre_hooks


def test_one_safetensors_file_a_torch_file_and_an_offload_folder(tmp_path, want):
    state = {name: value for name, value in model().state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    torch.save(model().state_dict(), tmp_path / "pytorch.bin")
    torch.save(model().state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    offload = pytest.importorskip("accelerate.utils.offload")
    half = {name: value.bfloat16() for name, value in state.items()}
    offload.offload_state_dict(tmp_path / "offloaded", state)
    offload.offload_state_dict(tmp_path / "half", half)

    for path in ("model.safetensors", "pytorch.bin", "old.bin", "offloaded", "."):
        assert torch.equal(load(empty(), tmp_path / path)(ids()), want), path
        assert torch.equal(load(empty(), tmp_path / path, mapped=False)(ids()), want), path
    got = dict(weights_of(load(empty(), tmp_path / "half")))
    assert all(torch.equal(got[name], value.float()) for name, value in half.items())


def test_a_checkpoint_of_ours_is_loaded(tmp_path, want):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model())
    accelerator.save_state(tmp_path / "own")
    accelerator.end_training()

    assert torch.equal(load(empty(), tmp_path / "own")(ids()), want)


def test_the_dtype_changes_while_it_streams(tmp_path):
    folder = shards(tmp_path / "c", model())
    places = plan(empty(), {"cpu": "1GB"}, dtype=torch.bfloat16)
    loaded = load(empty(), folder, places)

    assert {it.dtype for it in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded(ids()), model().bfloat16()(ids()))


def test_a_model_with_weights_keeps_its_tensors(tmp_path, want):
    folder = shards(tmp_path / "c", model())
    target = model(seed=5)
    kept = dict(target.named_parameters())
    load(target, folder)

    assert torch.equal(target(ids()), want)
    assert all(value is kept[name] for name, value in target.named_parameters())


def test_without_a_callback_the_bytes_are_shown_where_people_wait(tmp_path, monkeypatch, capsys):
    def late(tenant, made=arranging._made):
        time.sleep(0.02)
        return made(tenant)

    monkeypatch.setattr(arranging, "_made", late)
    monkeypatch.setattr("accel_core.distributed.progress.TELL_EVERY", 0.01)
    folder = shards(tmp_path / "c", model())
    load(empty(), folder)
    assert f"accel: loading {folder}: [" in capsys.readouterr().err

    load(empty(), folder, progress=lambda done, total: None)
    assert capsys.readouterr().err == ""


def test_progress_ends_with_all_bytes(tmp_path):
    seen = []
    load(empty(), shards(tmp_path / "c", model()), progress=lambda done, total: seen.append((done, total)))

    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def unchanged(target, before):
    return all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_a_device_that_is_not_here_is_named_before_anything_changes(tmp_path):
    target = empty()
    with pytest.raises(ConfigError, match=r"parts on cuda:63, which cannot be used here.*\nname devices"):
        load(target, shards(tmp_path / "c", model()), plan_from_map(target, {"": "cuda:63"}))
    assert all(each.is_meta for each in target.parameters())


def test_a_cut_shard_is_named_and_the_model_stays_as_it_was(tmp_path):
    folder = shards(tmp_path / "c", model())
    victim = folder / "model-00002-of-00003.safetensors"
    victim.write_bytes(victim.read_bytes()[:-100])
    target = model(seed=5)
    before = {name: value.clone() for name, value in target.state_dict().items()}

    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors.*was cut"):
        load(target, folder)
    assert unchanged(target, before)


def test_a_file_that_is_cut_while_it_is_read_is_named_and_nothing_is_half_loaded(tmp_path, monkeypatch):
    from accel_big_models import files

    folder = shards(tmp_path / "c", model())
    target = model(seed=5)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    fine = files.OpenFile.read

    def cut(self, start, wanted):
        if len(wanted) > 4000 and "00002" in self.path.name:
            shutil.copy(self.path, tmp_path / "copy")
            with self.path.open("r+b") as file:
                file.truncate(start + 10)
        fine(self, start, wanted)

    monkeypatch.setattr(files.OpenFile, "read", cut)
    with pytest.raises(CheckpointError, match=r"00002-of-00003.*it was cut"):
        load(target, folder, mapped=False)
    assert unchanged(target, before)


@pytest.mark.parametrize(
    "junk", [b"", b"short", b"\xff" * 64, (20).to_bytes(8, "little") + b'{"a": {"dtype": "F9"}}']
)
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path, junk):
    (tmp_path / "bad.safetensors").write_bytes(junk)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        load(empty(), tmp_path / "bad.safetensors")


def test_missing_and_unexpected_names_and_other_shapes_are_errors(tmp_path):
    state = {name: value for name, value in model().state_dict().items() if name != "head.weight"}
    without = {name: value for name, value in state.items() if name != "blocks.1.gain"}
    save_file(without, tmp_path / "without.safetensors")
    save_file({**state, "more": torch.ones(1)}, tmp_path / "more.safetensors")
    save_file({**state, "scale": torch.ones(2)}, tmp_path / "shape.safetensors")
    save_file({**state, "head.weight": torch.zeros(50, 32)}, tmp_path / "untied.safetensors")

    for name, problem in {
        "without": r"lacks blocks\.1\.gain",
        "more": "the model lacks more",
        "shape": r"scale has shape \[2\]",
        "untied": "are one tensor in the model",
    }.items():
        with pytest.raises(CheckpointError, match=problem):
            load(empty(), tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks blocks\.1\.gain"):
        load(empty(), tmp_path / "without.safetensors", strict=False)
    loaded = load(model(seed=5), tmp_path / "without.safetensors", strict=False)
    assert torch.equal(loaded.blocks[1].gain, model(seed=5).blocks[1].gain)
    load(empty(), tmp_path / "more.safetensors", strict=False)


def test_a_shard_that_lacks_what_the_index_says_is_named(tmp_path):
    folder = shards(tmp_path / "c", model())
    index = folder / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["norm.weight"] = "model-00001-of-00003.safetensors"
    told["weight_map"]["norm.bias"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"has no weight norm\."):
        load(empty(), folder)
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="00003"):
        load(empty(), folder)


def test_a_replaced_file_goes_on_as_it_was(tmp_path, want):
    folder = shards(tmp_path / "c", model())
    loaded = load(empty(), folder, plan_from_map(empty(), {"": "disk"}), mapped=False)
    for path in folder.glob("*.safetensors"):
        path.with_suffix(".new").write_bytes(b"\0" * path.stat().st_size)
        path.with_suffix(".new").replace(path)

    assert torch.equal(loaded(ids()), want)


def test_writes_to_mapped_weights_stay_in_the_process(tmp_path, want):
    folder = shards(tmp_path / "c", model())
    loaded = load(empty(), folder)
    with torch.no_grad():
        loaded.scale.zero_()

    assert torch.equal(load(empty(), folder)(ids()), want)


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (torch.tensor([1, 300]), torch.zeros(2, dtype=torch.int8)),
        (torch.tensor([0, 2]), torch.zeros(2, dtype=torch.bool)),
        pytest.param(torch.tensor([1j, 2]), torch.zeros(2, dtype=torch.int32), marks=WRITES_COMPLEX),
    ],
)
def test_numbers_that_another_dtype_would_cut_are_refused_by_name(tmp_path, have, want):
    save_file({"steps": have}, tmp_path / "w.safetensors")
    target = torch.nn.Module()
    target.register_buffer("steps", want)

    with pytest.raises(CheckpointError, match=f"steps has {have.dtype}, and the model's {want.dtype}"):
        load(target, tmp_path / "w.safetensors")


def test_integers_are_widened(tmp_path):
    save_file({"steps": torch.tensor([1, -3], dtype=torch.int8)}, tmp_path / "w.safetensors")
    target = torch.nn.Module()
    target.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    assert load(target, tmp_path / "w.safetensors").steps.tolist() == [1, -3]


def test_a_weight_without_elements_needs_no_hook(tmp_path):
    def made() -> torch.nn.Module:
        target = torch.nn.Linear(3, 2)
        target.none = torch.nn.Parameter(torch.zeros(0, 3))
        return target

    source = made()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    target = made()
    load(target, tmp_path / "w.safetensors", plan_from_map(target, {"": "disk"}))
    target(torch.ones(1, 3)).sum().backward()

    assert not target._forward_hooks
    assert target.none.shape == (0, 3)
    assert target.weight.grad is not None


def test_a_file_that_is_written_to_while_it_is_read_is_named(tmp_path):
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, file)
    target = torch.nn.Linear(3, 2)
    load(target, file, plan_from_map(target, {"": "disk"}), mapped=False)
    other = bytearray(file.read_bytes())
    other[-4:] = b"\0\0\0\x40"
    with file.open("r+b") as out:
        out.write(other)
    os.utime(file, ns=(1, 1))  # a clock may be coarse

    with pytest.raises(CheckpointError, match=r"w\.safetensors: something wrote to it"):
        target(torch.ones(1, 3))


def test_a_model_is_pickled_though_the_link_to_its_file_is_gone(tmp_path):
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    link = tmp_path / "link.safetensors"
    link.symlink_to("w.safetensors")
    target = torch.nn.Linear(3, 2)
    load(target, link, plan_from_map(target, {"": "disk"}), mapped=False)
    link.unlink()

    assert pickle.loads(pickle.dumps(target))(torch.ones(1, 3)).tolist() == [[3.0, 3.0]]
