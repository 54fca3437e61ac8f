"""Folders of torch.distributed.checkpoint, in and out; a crafted `.metadata` runs nothing."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil

import convert_jobs as jobs
import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from accel_checkpoint_tools import dcp
from accel_checkpoint_tools.contents import Contents, Source
from accel_checkpoint_tools.trusted import read_metadata
from accel_core import Accelerator, CheckpointError
from accel_core.cli.group import accel

PARAMETERS = {
    "model/embedding.weight",
    *(f"model/{module}.{name}" for module in ("norm", "hidden") for name in ("weight", "bias")),
}


def run(run_processes, job, *folders, world=1, **options):
    return run_processes(jobs.do, job.__name__, [*map(str, folders)], options, world=world, timeout=90)[0]


def command(*words):
    ended = CliRunner().invoke(accel, ["checkpoint", *map(str, words)], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended


def lists(contents):
    return {key: source.read().tolist() for (_, key), source in contents.tensors.items()}


def lists_of(folder):
    with Contents.open(folder) as contents:
        return lists(contents)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, run_processes):
    folder = tmp_path_factory.mktemp("saved")
    run(run_processes, jobs.torch_saves, folder / "theirs")
    run(run_processes, jobs.core_is_fresh, folder / "fresh", groups=False)
    return folder


@pytest.fixture
def theirs(saved, tmp_path):
    return shutil.copytree(saved / "theirs", tmp_path / "theirs")


@pytest.fixture
def contents(saved):
    with Contents.open(saved / "fresh") as opened:
        yield opened


def read(theirs, contents):
    return dcp.read(theirs, contents, "unit0", "model", "optimizer")


# -- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_weights_and_optimizer_are_imported_by_name(saved, tmp_path, contents, flat, run_processes):
    run(run_processes, jobs.torch_saves, tmp_path / "theirs", flat=flat)

    assert read(tmp_path / "theirs", contents) == ["scheduler"]

    assert lists(contents) == run(run_processes, jobs.torch_state, saved / "theirs")
    (group,) = contents.state["units"]["unit0"]["optimizers"][0]["groups"]
    assert group["lr"] == 0.005
    assert {f"model/{name}" for name in group["params"]} == PARAMETERS


def test_the_command_imports_what_a_run_then_loads(saved, tmp_path, run_processes):
    folders = saved / "theirs", tmp_path / "new", "--like", saved / "fresh"
    ended = command("import", "--format", "dcp", *folders)

    assert "left out: scheduler" in ended.output
    assert lists_of(tmp_path / "new") == run(run_processes, jobs.torch_state, saved / "theirs")
    job = jobs.Job(jobs.core(), 1, groups=False)
    job.accelerator.load_state(tmp_path / "new")
    job.train(1)
    job.accelerator.end_training()


def test_a_script_imports_into_what_it_has_prepared(saved, tmp_path, run_processes):
    left_out, found = run(run_processes, jobs.core_imports_dcp, saved / "theirs", tmp_path / "here")

    assert left_out == ["scheduler"]
    assert found == run(run_processes, jobs.torch_state, saved / "theirs")


def test_torch_loads_what_is_exported(tmp_path, run_processes):
    run(run_processes, jobs.core_saves, tmp_path / "ours", groups=False)

    ended = command("export", "--format", "dcp", tmp_path / "ours", tmp_path / "theirs")

    assert "left out: schedulers, random streams" in ended.output
    found, rate = run(run_processes, jobs.torch_loads, tmp_path / "theirs")
    assert found == lists_of(tmp_path / "ours")
    assert rate == 0.005


def averaged(contents):
    """Add the state of a plugin that averages weights."""
    contents.tensors["unit0", "plugins/average/weights/norm.bias"] = Source.of(torch.ones(6))
    scopes = contents.ranks[0]["plugins"].setdefault("unit0", {})
    scopes.setdefault("replicated", {})["average"] = {"steps": [3]}
    return contents


def test_what_a_plugin_has_made_of_other_weights_is_not_kept(theirs, contents):
    left_out = read(theirs, averaged(contents))

    assert left_out == ["scheduler", "the state of plugin average, which begins anew"]
    assert not [key for _, key in contents.tensors if key.startswith("plugins/")]
    assert not contents.ranks[0]["plugins"]["unit0"]["replicated"]


def test_an_export_says_that_it_lacks_the_state_of_plugins(tmp_path, contents):
    left_out = dcp.write(averaged(contents), tmp_path, "unit0", "model", "optimizer")

    assert left_out[1:] == ["the state of plugin average"]


@pytest.mark.parametrize("taken", ["file/theirs", "theirs"], ids=["below a file", "by another export"])
def test_a_target_that_cannot_be_written_is_named(tmp_path, saved, monkeypatch, taken):
    (tmp_path / "file").touch()
    written = dcp.write

    def write(*arguments, **options):
        (tmp_path / "theirs" / "other").mkdir(parents=True)
        return written(*arguments, **options)

    monkeypatch.setattr(dcp, "write", write)
    target = str(tmp_path / taken)
    words = ["checkpoint", "export", "--format", "dcp", str(saved / "fresh"), target]
    with pytest.raises(CheckpointError, match=f"{re.escape(target)} could not be written"):
        CliRunner().invoke(accel, words, catch_exceptions=False)


def test_parts_of_several_ranks_are_put_together(tmp_path, run_processes):
    expected = run(run_processes, jobs.shards_save, tmp_path / "theirs", world=2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state(tmp_path / "fresh")
    accelerator.end_training()

    with Contents.open(tmp_path / "fresh") as contents:
        read(tmp_path / "theirs", contents)
        assert lists(contents) == expected


# -- what does not fit ---------------------------------------------------------------------------


def test_a_key_that_is_not_there_is_answered_with_those_that_are(theirs, contents):
    with pytest.raises(CheckpointError, match="has no 'net'; it has model, optimizer, scheduler\nsay which"):
        dcp.read(theirs, contents, "unit0", "net", "optimizer")


def test_a_folder_without_metadata_is_none_of_these(tmp_path, contents):
    with pytest.raises(CheckpointError, match="was not written by torch.distributed.checkpoint"):
        read(tmp_path, contents)


def test_a_unit_must_be_chosen_where_there_are_several(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "fresh")
    accelerator.end_training()

    with pytest.raises(CheckpointError, match="units unit0, unit1\nchoose one of them with --unit"):
        command("export", "--format", "dcp", tmp_path / "fresh", tmp_path / "out")
    command("export", "--format", "dcp", tmp_path / "fresh", tmp_path / "out", "--unit", "unit1")


# -- crafted -------------------------------------------------------------------------------------


class Code:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


CALLS = {
    "os.system": (os.system, "touch ran"),
    "eval": (eval, "open('ran', 'w')"),
    "getattr": (getattr, "text", "format"),
    "torch.load": (torch.load, "ran"),
    "torch.hub.load": (torch.hub.load, "ran", "ran"),
    "open": (open, "ran", "w"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("protocol", range(2, 6))
def test_code_in_the_metadata_is_refused_and_not_run(tmp_path, call, protocol, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Code(*CALLS[call]), protocol))

    with pytest.raises(CheckpointError, match="it names .*, which no such file needs"):
        read_metadata(tmp_path / ".metadata")

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line",
    [
        b"ctorch\nfloat32.__class__\n.",
        b"ctorch\n_C\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n.",
        b"cbuiltins\neval\n.",
        b"cpathlib\nPosixPath.write_text\n.",
        b"\x8c\x05torch\x8c\x08hub.load\x93.",
    ],
)
def test_no_other_name_is_reached_by_a_detour(tmp_path, line):
    (tmp_path / ".metadata").write_bytes(line)

    with pytest.raises(CheckpointError, match="it names"):
        read_metadata(tmp_path / ".metadata")


def rewrite(theirs, change):
    """Change the metadata, and write it as torch itself would."""
    metadata = FileSystemReader(theirs).read_metadata()
    change(metadata)
    with (theirs / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def test_code_in_an_item_is_refused_and_not_run(theirs, contents, tmp_path):
    buffer = io.BytesIO()
    torch.save(Code(open, str(tmp_path / "ran"), "w"), buffer)
    (theirs / "crafted").write_bytes(buffer.getvalue())

    def change(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn.endswith("hidden.weight"):
                place.relative_path, place.offset, place.length = "crafted", 0, len(buffer.getvalue())

    rewrite(theirs, change)

    read(theirs, contents)
    with pytest.raises(CheckpointError, match="cannot be read as plain data"):
        contents.write(tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def elsewhere(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


def beyond(metadata):
    for place in metadata.storage_data.values():
        place.offset = 1 << 40


def huge(metadata):
    for described in metadata.state_dict_metadata.values():
        if hasattr(described, "size"):
            described.size = torch.Size([1 << 20] * len(described.size))


def huge_parts(metadata):
    for described in metadata.state_dict_metadata.values():
        if hasattr(described, "size"):
            described.size = torch.Size([1 << 20] * len(described.size))
            described.chunks = [ChunkStorageMetadata(torch.Size([0] * len(described.size)), described.size)]


def transformed(metadata):
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


def nowhere(metadata):
    metadata.storage_data.clear()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (elsewhere, "is no file in this folder"),
        (beyond, "are not in"),
        (huge, "elements are held by no rank"),
        (huge_parts, "elements cannot be in"),
        (transformed, "it is stored as .'zstd'"),
        (nowhere, "does not describe what is there"),
    ],
)
def test_a_description_that_lies_is_refused_before_anything_is_allocated(theirs, contents, change, said):
    rewrite(theirs, change)

    with pytest.raises(CheckpointError, match=said):
        read(theirs, contents)


def test_a_file_that_is_a_link_is_not_followed(theirs, contents):
    for file in list(theirs.glob("*.distcp")):
        file.rename(theirs.parent / file.name)
        file.symlink_to(theirs.parent / file.name)

    with pytest.raises(CheckpointError, match="are not in"):
        read(theirs, contents)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_damaged_metadata_is_named(theirs, contents, part):
    content = (theirs / ".metadata").read_bytes()
    (theirs / ".metadata").write_bytes(content[: int(len(content) * part)])

    with pytest.raises(CheckpointError, match="metadata cannot be read as plain data"):
        read(theirs, contents)
