"""`accel checkpoint` works on what `accel_core.storage.save` saved, without an Accelerator."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_checkpoint_tools.contents import Contents
from accel_core.storage import save


@pytest.fixture
def folder(tmp_path):
    """Two checkpoints of a plain program, one step apart."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        save(state, checkpoint_id=tmp_path / f"step{step}")
    tmp_path.joinpath("weight.json").write_text(json.dumps(model.weight.tolist()))
    return tmp_path


def test_they_are_listed_with_their_steps_and_are_whole(accel, folder):
    rows = accel("checkpoint", "list", str(folder)).stdout.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["step1", "1"], ["step2", "2"]]
    assert accel("checkpoint", "verify", str(folder / "step2")).stdout.endswith("step2: OK\n")


def test_their_weights_are_exported_and_compared(accel, folder):
    accel("checkpoint", "export", str(folder / "step2"), str(folder / "out"))
    weight = load_file(folder / "out" / "model.safetensors")["weight"]
    assert weight.tolist() == json.loads((folder / "weight.json").read_text())
    told = accel("checkpoint", "diff", str(folder / "step1"), str(folder / "step2")).stdout
    assert "model: 2 of 2 tensors differ" in told
    assert "step: 1 -> 2" in told


class App:
    """An object that a program saves whole."""

    def __init__(self, weight, number):
        self.state = {"model": {"weight": torch.full((2, 3), weight)}, "n": number}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def plain(weight=1.0, number=3):
    return {"app": App(weight, number).state_dict()}


def found(accel, folder, one, other, *words):
    """Save two states; return the exit status of `diff` and what it prints."""
    for name, state in (("a", one), ("b", other)):
        save(state, checkpoint_id=folder / name)
    ended = accel("checkpoint", "diff", str(folder / "a"), str(folder / "b"), *words)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (plain(), plain(weight=2.0), ["values: 1 of 1 tensors differ", "main  app/model/weight  max 1"]),
        (plain(), plain(number=4), ["values", "app/n: 3 -> 4"]),
        ({"app": App(1.0, 3)}, {"app": App(2.0, 4)}, ["values: 1 of 1 tensors", "app/n: 3 -> 4"]),
        (
            {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.zeros(2)}},
            {"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}},
            ["values: 1 of 1 tensors differ", "main  optimizer/m  max 1"],
        ),
        ({"n": 1, "flag": 1}, {"n": 1, "flag": True}, ["flag: 1 -> true"]),
        ({"n": 1}, {"n": 1, "more": None}, ["more: (absent) -> null"]),
    ],
)
def test_each_tensor_and_value_of_a_state_is_compared(accel, tmp_path, one, other, told):
    status, output = found(accel, tmp_path, one, other)
    assert status == 1
    assert [words for words in told if words not in output] == []


def test_equal_states_have_no_difference(accel, tmp_path):
    assert found(accel, tmp_path, plain(), plain()) == (0, "no difference\n")


def test_values_are_left_out_by_name_only(accel, tmp_path):
    one, other = ({"model": {"w": torch.ones(2)}, "n": number} for number in (1, 2))
    assert found(accel, tmp_path, one, other, "--only", "model") == (0, "no difference\n")
    assert found(accel, tmp_path, one, other, "--only", "values")[0] == 1


def test_sections_that_neither_checkpoint_has_are_not_equal(accel, tmp_path):
    status, output = found(accel, tmp_path, plain(), plain(2.0), "--only", "model", "--only", "optimizer")
    assert status == 2
    assert "nothing to compare in model, optimizer" in output
    assert "values" in output


def test_an_unknown_section_is_refused_by_name(accel, tmp_path):
    status, output = found(accel, tmp_path, plain(), plain(), "--only", "weights")
    assert (status, "no section 'weights'" in output) == (2, True)


def test_values_of_one_rank_are_compared(accel, tmp_path):
    save(plain(), checkpoint_id=tmp_path / "a")
    with Contents.open(tmp_path / "a") as contents:
        contents.ranks[0]["values"] = {"app/n": 4}
        contents.write(tmp_path / "b")
    ended = accel("checkpoint", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert ended.returncode == 1
    assert 'rank0: (absent) -> {"app/n": 4}' in ended.stdout


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp", "accelerate"])
def test_an_export_without_weights_is_an_error_that_says_where_tensors_are(accel, tmp_path, form):
    save(plain(), checkpoint_id=tmp_path / "a")
    ended = accel("checkpoint", "export", str(tmp_path / "a"), str(tmp_path / "out"), "--format", form)
    assert (ended.returncode != 0, ended.stdout) == (True, "")
    assert "has no weights of a model" in ended.stderr
    assert "values/app/model (1 tensor)" in ended.stderr
    assert "--prefix values/app/model" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_an_export_of_a_state_without_tensors_says_so(accel, tmp_path):
    save({"n": 1}, checkpoint_id=tmp_path / "a")
    ended = accel("checkpoint", "export", str(tmp_path / "a"), str(tmp_path / "out"))
    assert ended.returncode != 0
    assert "it has no tensors" in ended.stderr


def test_tensors_under_a_prefix_are_exported_as_weights(accel, tmp_path):
    save(plain(2.0), checkpoint_id=tmp_path / "a")
    words = "checkpoint", "export", str(tmp_path / "a"), str(tmp_path / "out"), "--prefix"
    assert accel(*words, "values/app/model").returncode == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: each.tolist() for name, each in weights.items()} == {"weight": [[2.0] * 3] * 2}

    ended = accel(*words, "values/app/mod")
    assert ended.returncode != 0
    assert "values/app/mod" in ended.stderr
    assert "values/app/model (1 tensor)" in ended.stderr


@pytest.mark.parametrize("form", ["dcp", "accelerate", "safetensors"])
def test_values_that_another_format_has_no_place_for_are_told(accel, folder, form):
    ended = accel(*("checkpoint", "export", str(folder / "step1"), str(folder / "out"), "--format", form))
    assert ended.returncode == 0, ended.stderr
    assert "left out: 6 tensor(s)" in ended.stderr
    assert "under values/" in ended.stderr


def test_nothing_is_imported_into_a_checkpoint_without_weights(accel, folder):
    save(plain(), checkpoint_id=folder / "like")
    accel("checkpoint", "export", str(folder / "step1"), str(folder / "dcp"), "--format", "dcp")
    words = "checkpoint", "import", str(folder / "dcp"), str(folder / "new"), "--format", "dcp", "--like"
    ended = accel(*words, str(folder / "like"))
    assert ended.returncode != 0
    assert "has no weights of a model" in ended.stderr
    assert not (folder / "new").exists()

    ended = accel(*words, str(folder / "step2"))
    assert ended.returncode == 0, ended.stderr
    assert "under values/" in ended.stderr
