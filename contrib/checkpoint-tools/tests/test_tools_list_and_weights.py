"""`accel checkpoint`: what is there, whether it is whole, and its weights for other libraries."""

from __future__ import annotations

import json
import re
import sys
import time
import weakref

import diff_jobs as jobs
import pytest
import torch
from opened import rewrite
from safetensors.torch import load_file
from torch import nn

from accel_checkpoint_tools import listing
from accel_checkpoint_tools.contents import Source
from accel_checkpoint_tools.weights import export
from accel_core import (
    Accelerator,
    CheckpointError,
    DataFile,
    Outline,
    Stored,
    read_manifest,
    storage_at,
)
from accel_core.distributed import progress
from accel_core.storage.commit import manifest_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 20)
        self.norm = nn.BatchNorm1d(20)
        self.head = nn.Linear(20, 30, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def project(tmp_path):
    """Two checkpoints of a run with two units."""
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(Tied(), nn.Linear(3, 3))
    for step in (3, 4):
        with torch.no_grad():
            model.embedding.weight.fill_(step)
        accelerator.save_state(tmp_path / "checkpoints" / f"at_{step}", step=step)
    accelerator.end_training()
    return tmp_path


def file_of(folder, name):
    """Return the path of a file of a checkpoint's newest save."""
    return folder / read_manifest(storage_at(folder)).save_id / name


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- list ----------------------------------------------------------------------------------------


def train(folder, *, resume):
    """Four micro-batches, of which two make a step; saved without a word about the step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if resume:
        accelerator.load_state(folder)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.end_training()
    return optimizer.steps_done


def test_a_list_has_the_optimizer_steps_of_a_save_that_names_none_after_a_resume_too(tmp_path, accel):
    for resume, steps in ((False, 2), (True, 4)):
        assert train(tmp_path / "last", resume=resume) == steps
        (_, row) = accel("checkpoint", "list", str(tmp_path)).stdout.splitlines()
        assert row.split()[:2] == ["last", f"{steps}"]


def test_checkpoints_of_a_project_are_listed(project, accel):
    (project / "checkpoints" / "at_5" / "save-0123456789abcdef").mkdir(parents=True)
    (project / "checkpoints" / "notes").mkdir()

    lines = accel("checkpoint", "list", str(project)).stdout.splitlines()

    assert len(lines) == 3
    assert re.match("NAME +STEP +AGE +SIZE +RANKS +STACK +VALID$", lines[0])
    for line, step in zip(lines[1:], (3, 4), strict=True):
        assert re.match(
            rf"at_{step} +{step} +\d+ (s|min) +\S+ kB +1 +native \+ single \+ fp32( \+ monitor)? +yes$", line
        )


def test_a_damaged_one_is_listed_with_its_damage(project, accel):
    damaged = file_of(project / "checkpoints" / "at_4", "state.json")
    flip(damaged)

    found = json.loads(accel("checkpoint", "list", "--json", str(project)).stdout)

    assert [row["valid"] for row in found] == [
        "yes",
        f"{damaged} is damaged: its digest is not the one in the manifest",
    ]
    assert [row["step"] for row in found] == [3, 4]


def test_of_one_checkpoint_the_parameters_are_listed(project, accel):
    folder = project / "checkpoints" / "at_3"

    shown = accel("checkpoint", "list", str(folder)).stdout
    found = json.loads(accel("checkpoint", "list", "--json", str(folder)).stdout)

    assert "unit0  embedding.weight          [30, 20]  float32\n" in shown
    assert {"unit": "unit1", "name": "bias", "shape": [3], "dtype": "float32"} in found["parameters"]
    assert len(found["parameters"]) == 8


def test_where_there_is_none_it_says_so(tmp_path, accel):
    assert accel("checkpoint", "list", cwd=tmp_path).stdout == "no checkpoint in .\n"


# -- verify --------------------------------------------------------------------------------------


def test_all_that_is_whole_is_said_to_be(project, accel):
    ended = accel("checkpoint", "verify", str(project))

    assert ended.returncode == 0
    assert ended.stdout.count("OK") == 2
    assert ended.stderr == ""


def test_a_folder_without_a_checkpoint_is_not_passed_over_beside_one_with(project, tmp_path, accel):
    (tmp_path / "lost").mkdir()

    ended = accel("checkpoint", "verify", str(project), str(tmp_path / "lost"))

    assert ended.returncode == 1
    assert f"no checkpoint in {tmp_path / 'lost'}\n" in ended.stderr


def test_every_damaged_file_is_named(project, accel):
    folder = project / "checkpoints" / "at_3"
    names = ("state.json", "rank-00000.json", "rank-00000.safetensors")
    files = [file_of(folder, name) for name in names]
    files[0].unlink()
    flip(files[1])
    flip(files[2])

    ended = accel("checkpoint", "verify", str(folder), str(project / "checkpoints" / "at_4"))

    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert {line.split(" is damaged")[0] for line in lines[:3]} == {*map(str, files)}
    assert lines[3].endswith("at_4: OK")


def test_a_damaged_manifest_is_named(project, accel):
    flip(project / "checkpoints" / "at_3" / "manifest-00000001.json")

    ended = accel("checkpoint", "verify", "--json", str(project))

    assert ended.returncode == 1
    bad, good = json.loads(ended.stdout).values()
    assert "manifest-00000001.json is damaged" in bad[0]
    assert good == []


def test_a_manifest_cannot_point_out_of_its_folder(project, accel):
    path = project / "checkpoints" / "at_3" / "manifest-00000001.json"
    members = json.loads(path.read_text())
    members.pop("checksum")
    members["files"]["../at_4/state.json"] = members["files"]["state.json"]
    path.write_bytes(manifest_of(members))

    ended = accel("checkpoint", "verify", str(path.parent))

    assert "'../at_4/state.json' is not a file in this folder" in ended.stdout


def test_a_save_that_comes_meanwhile_is_verified_instead(project, monkeypatch):
    folder = project / "checkpoints" / "at_3"
    accelerator, look, others = Accelerator(cpu=True), listing._problems, [1]
    accelerator.prepare(nn.Linear(2, 2))

    def replaced(*arguments):
        if others:
            others.pop()
            accelerator.save_state(folder)
        return look(*arguments)

    monkeypatch.setattr(listing, "_problems", replaced)
    assert listing.problems_of(storage_at(folder)) == []
    accelerator.end_training()


@pytest.mark.parametrize("words", [["list"], ["verify"]], ids=" ".join)
def test_looking_imports_no_torch(project, words, run_command):
    code = "import sys; from accel_core.cli import main; sys.argv = ['accel', *sys.argv[1:]]\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "checkpoint", *words, str(project / "checkpoints" / "at_3")]

    ended = run_command(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


# -- export --------------------------------------------------------------------------------------


def test_the_weights_of_each_unit_are_exported_whole(project, accel):
    ended = accel("checkpoint", "export", str(project / "checkpoints" / "at_3"), str(project / "out"))

    assert ended.stdout.splitlines() == [str(project / "out" / unit) for unit in ("unit0", "unit1")]
    tied = load_file(project / "out" / "unit0" / "model.safetensors")
    assert "head.weight" not in tied
    assert (tied["embedding.weight"] == 3).all()
    assert sorted(load_file(project / "out" / "unit1" / "model.safetensors")) == ["bias", "weight"]


def test_each_model_of_a_unit_is_exported_under_its_own_names_in_the_order_of_prepare(tmp_path, accel):
    accelerator = Accelerator(device="cpu")
    generator, critic = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(3, 4), nn.Linear(2, 3))
    critic[1].weight = generator[0].weight
    parameters = [*critic.parameters(), generator[0].bias]
    accelerator.prepare(generator, critic, torch.optim.SGD(parameters, lr=0.1))
    accelerator.save_state(tmp_path / "here")
    accelerator.end_training()

    ended = accel("checkpoint", "export", str(tmp_path / "here"), str(tmp_path / "out"))

    assert ended.stdout.splitlines() == [str(tmp_path / "out" / name) for name in ("model0", "model1")]
    for name, model in (("model0", generator), ("model1", critic)):
        found = load_file(tmp_path / "out" / name / "model.safetensors")
        assert {key: each.tolist() for key, each in found.items()} == {
            key: each.tolist() for key, each in model.state_dict().items()
        }


def test_weights_that_are_there_are_replaced_only_by_force(project, accel):
    (project / "out").mkdir()
    mine = project / "out" / "model.safetensors"
    mine.write_text("mine")
    words = (
        "checkpoint",
        "export",
        str(project / "checkpoints" / "at_3"),
        str(project / "out"),
        "--unit",
        "unit0",
    )

    ended = accel(*words)
    assert ended.returncode == 1
    assert f"{mine} exists, and was left as it is" in ended.stderr
    assert "--force" in ended.stderr
    assert mine.read_text() == "mine"

    assert accel(*words, "--force").returncode == 0
    assert (load_file(mine)["embedding.weight"] == 3).all()


@pytest.mark.parametrize("size", ["10GB", "1kB"])
@pytest.mark.parametrize("before", ["safetensors", "torch"])
def test_by_force_weights_of_another_format_go_once_the_new_ones_are_there(project, before, size, accel):
    at_3, out = str(project / "checkpoints" / "at_3"), project / "out"
    export = ("checkpoint", "export", at_3, str(out), "--unit", "unit0", "--max-shard-size", size)
    after = {"safetensors": "torch", "torch": "safetensors"}[before]
    assert accel(*export, "--format", before).returncode == 0
    (out / "notes.txt").touch()

    ended = accel(*export, "--format", after)
    assert (ended.returncode, "exists, and was left as it is" in ended.stderr) == (1, True)
    assert accel(*export, "--format", after, "--force").returncode == 0

    suffix = {"safetensors": ".safetensors", "torch": ".bin"}[after]
    names = {path.name for path in out.iterdir()} - {"notes.txt"}
    assert {suffix in name for name in names} == {True}
    assert (len(names) == 1) == (size == "10GB")
    assert (out / "notes.txt").exists()


@pytest.mark.parametrize("outside", ["../outside", ".."])
def test_a_unit_whose_name_is_not_that_of_a_folder_is_exported_alone(tmp_path, outside, accel):
    accelerator = Accelerator(cpu=True)
    for name in (outside, "inside"):
        model = torch.nn.Linear(1, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    words = ("checkpoint", "export", str(tmp_path / "saved"), str(tmp_path / "there" / "out"))

    ended = accel(*words)
    assert ended.returncode == 1
    assert f"unit {outside!r} has no name that a folder can have" in ended.stderr
    assert not (tmp_path / "there").exists()
    assert accel(*words, "--unit", outside).returncode == 0
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["out"]


@pytest.mark.parametrize(
    "words",
    [
        ("list", "nowhere://b/c"),
        ("verify", "nowhere://b/c"),
        ("export", "nowhere://b/c", "x"),
        ("export", ".", "nowhere://b/c"),
    ],
)
def test_a_url_that_no_plugin_serves_is_refused_by_name(words, accel):
    ended = accel("checkpoint", *words)
    assert ended.returncode == 1
    assert "no plugin here reads and writes nowhere: URLs" in ended.stderr


def test_one_unit_can_be_chosen_and_torchs_own_format(project, accel):
    accel(
        *("checkpoint", "export", str(project / "checkpoints" / "at_4"), str(project / "out")),
        *("--unit", "unit0", "--format", "torch", "--max-shard-size", "1kB"),
    )

    index = json.loads((project / "out" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"]["head.weight"] == index["weight_map"]["embedding.weight"]
    files = [
        torch.load(project / "out" / file, weights_only=True) for file in {*index["weight_map"].values()}
    ]
    other = Tied()
    other.load_state_dict({name: tensor for file in files for name, tensor in file.items()})


def test_nothing_of_a_damaged_checkpoint_is_exported(project, accel):
    flip(file_of(project / "checkpoints" / "at_3", "rank-00000.safetensors"))

    ended = accel("checkpoint", "export", str(project / "checkpoints" / "at_3"), str(project / "out"))

    assert ended.returncode == 1
    assert "rank-00000.safetensors is damaged: block 0 is not what was written" in ended.stderr
    assert not (project / "out").exists()


def test_a_target_that_cannot_be_written_is_not_damage_of_the_checkpoint(project, accel):
    (project / "file").touch()

    ended = accel(
        "checkpoint", "export", str(project / "checkpoints" / "at_3"), str(project / "file" / "out")
    )

    assert ended.returncode == 1
    assert f"accel: {project / 'file' / 'out'}" in ended.stderr
    assert "could not be written" in ended.stderr
    assert "damaged" not in ended.stderr


def test_a_unit_that_is_not_there_is_named(project, accel):
    ended = accel("checkpoint", "export", str(project / "checkpoints" / "at_3"), "out", "--unit", "unit3")

    assert ended.returncode == 1
    assert "has no unit 'unit3'\nit has unit0, unit1" in ended.stderr


@pytest.mark.needs("accel-fsdp")
def test_what_several_ranks_saved_in_parts_is_exported_whole(tmp_path, run_processes):
    run_processes(jobs.train, str(tmp_path), "fsdp", world=2)
    run_processes(jobs.save_again, str(tmp_path / "step3"), str(tmp_path / "whole"), "single", world=1)

    for name in ("step3", "whole"):
        export(str(tmp_path / name), str(tmp_path / "out" / name), unit=None, limit="10GB", safe=True)

    one, other = (load_file(tmp_path / "out" / name / "model.safetensors") for name in ("step3", "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_export_holds_no_more_than_one_file_of_weights(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(9))))
    accelerator.save_state(tmp_path / "here")
    accelerator.end_training()
    alive, most = weakref.WeakSet(), []
    whole = Stored.tensor

    def tensor(stored):
        alive.add(made := whole(stored))
        most.append(len(alive))
        return made

    monkeypatch.setattr(Stored, "tensor", tensor)

    export(str(tmp_path / "here"), str(tmp_path / "out"), unit=None, limit=800, safe=True)

    assert len(most) == 9
    assert max(most) <= 3, "two in the file that is made, and the one that did not fit"


def test_weights_that_only_a_plugin_can_read_are_refused(project):
    def change(contents):
        tensor = torch.zeros(3, 3)
        outline = Outline("opaque", (3, 3), "float32", "toy8")
        contents.tensors["unit1", "model/weight"] = Source(outline, lambda: tensor)

    rewrite(project / "checkpoints" / "at_3", project / "changed", change)

    with pytest.raises(CheckpointError, match="unit1: weight has layout toy8, which only the plugin"):
        export(str(project / "changed"), str(project / "out"), unit="unit1", limit="10GB", safe=True)


def test_verifying_and_exporting_are_shown(project, monkeypatch, capsys):
    plain = DataFile._read

    def late(*arguments):
        time.sleep(0.05)
        plain(*arguments)

    monkeypatch.setattr(progress, "TELL_EVERY", 0.01)
    monkeypatch.setattr(DataFile, "_read", late)
    listing.problems_of(storage_at(project / "checkpoints" / "at_3"))
    assert "accel: verifying at_3: [" in capsys.readouterr().err
    export(str(project / "checkpoints" / "at_3"), str(project / "out"), unit="unit0", limit="1GB", safe=True)
    assert "accel: verifying at_3: " in capsys.readouterr().err


# -- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "here", "out", "--format", "deepspeed"], "'deepspeed' is not one of"),
        (["import", "here", "out", "--format", "torch", "--like", "here"], "'torch' is not one of"),
        (["export", "here", "out", "--format", "dcp", "--force"], "--format dcp takes no --force"),
        (["export", "here", "out", "--model", "net"], "--format safetensors takes no --model"),
        (["export", "here", "out", "--loud"], "No such option"),
    ],
)
def test_what_a_format_does_not_take_is_refused(words, said, tmp_path, accel):
    (tmp_path / "here").mkdir()

    ended = accel("checkpoint", *words, cwd=tmp_path)

    assert ended.returncode == 2
    assert said in ended.stderr
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_that_is_the_working_directory_has_its_name(project, monkeypatch, accel):
    monkeypatch.chdir(project / "checkpoints" / "at_3")
    assert json.loads(accel("checkpoint", "list", "--json").stdout)["name"] == "at_3"
