"""What needs no other rank: precision of outputs, files."""

from __future__ import annotations

import io
import pickle
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from accel_core import CheckpointError, World, ops


class Harmful:
    def __reduce__(self):
        return print, ("this ran",)


def test_convert_to_fp32_changes_halves_only():
    given = [
        torch.ones(1, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8)
    ]
    assert [each.dtype for each in ops.convert_to_fp32(given)] == [
        torch.float32,
        torch.float32,
        torch.float64,
        torch.int8,
    ]


@pytest.fixture
def run():
    return SimpleNamespace(world=World())


def test_what_is_saved_is_loaded(run, tmp_path):
    data = {"t": torch.ones(2), "n": np.arange(3), "s": np.float32(2), "text": ["a", None, {"b": 1.5}]}
    ops.save(data, tmp_path / "data.bin", run=run)
    loaded = ops.load(tmp_path / "data.bin")
    assert (loaded["n"].tolist(), loaded["s"], loaded["text"]) == ([0, 1, 2], 2, ["a", None, {"b": 1.5}])
    assert ops.load(str(tmp_path / "data.bin"), map_location="meta")["t"].device.type == "meta"


def test_safetensors_are_known_by_their_content(run, tmp_path):
    ops.save({"t": torch.ones(2)}, tmp_path / "data.bin", safe_serialization=True, run=run)
    assert not zipfile.is_zipfile(tmp_path / "data.bin")
    assert ops.load(tmp_path / "data.bin")["t"].tolist() == [1, 1]
    assert ops.load(tmp_path / "data.bin", map_location="meta")["t"].device.type == "meta"


@pytest.mark.parametrize("safe_serialization", [False, True])
def test_open_files_are_written_and_read(run, safe_serialization):
    file = io.BytesIO()
    ops.save({"t": torch.ones(2)}, file, safe_serialization=safe_serialization, run=run)
    file.seek(0)
    assert ops.load(file)["t"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "held",
    [
        [torch.ones(1)],
        {"a": [1]},
        {"a": 1},
        {1: torch.ones(1)},
        {"a": torch.eye(2).to_sparse()},
        {"a": torch.ones(1, dtype=torch.complex128)},
    ],
    ids=["list", "list of numbers", "number", "key", "sparse", "complex"],
)
@pytest.mark.parametrize("opened", [False, True])
def test_what_safetensors_cannot_hold_is_an_error_of_ours(run, tmp_path, held, opened):
    file = io.BytesIO() if opened else tmp_path / "data.safetensors"
    with pytest.raises(CheckpointError, match="cannot hold .*(\n.*)*\nsave with safe_serialization=False$"):
        ops.save(held, file, safe_serialization=True, run=run)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [CheckpointError, RuntimeError])
def test_a_folder_that_is_not_there_is_the_error_of_torchs_save_too(run, tmp_path, kind):
    with pytest.raises(kind, match="file could not be written: FileNotFoundError"):
        ops.save({}, tmp_path / "nowhere" / "file", run=run)


@pytest.mark.parametrize(("held", "name"), [({"a": 1}, "data"), ({"a": torch.ones(1)}, "no/folder")])
def test_an_error_of_save_names_no_temporary_file(run, tmp_path, held, name):
    with pytest.raises(CheckpointError) as caught:
        ops.save(held, tmp_path / name, safe_serialization=True, run=run)
    assert "partial" not in str(caught.value)


def test_loading_runs_no_code_unless_it_is_asked_to(run, tmp_path, capsys):
    ops.save({"t": Harmful()}, tmp_path / "data.bin", run=run)
    with pytest.raises(pickle.UnpicklingError):
        ops.load(tmp_path / "data.bin")
    assert capsys.readouterr().out == ""
    ops.load(tmp_path / "data.bin", weights_only=False)
    assert capsys.readouterr().out == "this ran\n"


def test_arrays_of_objects_are_not_loaded(run, tmp_path):
    ops.save({"t": np.array([Harmful()])}, tmp_path / "data.bin", run=run)
    with pytest.raises(pickle.UnpicklingError):
        ops.load(tmp_path / "data.bin")


@pytest.mark.parametrize("kind", ["?", "i1", "u8", "f4", "c16", "M8[s]", "m8[s]", "U2", "S2"])
def test_arrays_of_numbers_texts_and_times_are_loaded(run, tmp_path, kind):
    array = np.zeros(2, dtype=kind)
    ops.save(array, tmp_path / "data.bin", run=run)
    loaded = ops.load(tmp_path / "data.bin")
    assert loaded.dtype == array.dtype
    assert np.array_equal(loaded, array)


def test_torchs_own_list_of_safe_globals_is_left_alone(run, tmp_path):
    before = set(torch.serialization.get_safe_globals())
    ops.save(np.arange(2), tmp_path / "data.bin", run=run)
    ops.load(tmp_path / "data.bin")
    assert set(torch.serialization.get_safe_globals()) == before


def writers(tmp_path, **options):
    found = []
    for rank in range(4):
        run = SimpleNamespace(world=World(rank=rank, size=4, local_rank=rank % 2, local_size=2, nodes=2))
        ops.save(rank, tmp_path / "data.bin", run=run, **options)
        if (tmp_path / "data.bin").exists():
            found.append(rank)
            (tmp_path / "data.bin").unlink()
    return found


def test_one_rank_writes_or_one_a_node(tmp_path):
    assert writers(tmp_path) == [0]
    assert writers(tmp_path, save_on_each_node=True) == [0, 2]


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="one of sum, mean, min, max, none, got 'avg'"):
        ops.reduce(torch.ones(1), "avg", run=SimpleNamespace())
