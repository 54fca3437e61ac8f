"""The format's page is enough to read a checkpoint; what is damaged or crafted is named, and not loaded."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import page_reader
import pytest
import safetensors
import torch
import xxhash
from torch import nn

from accel_core import Accelerator
from accel_core.errors import CheckpointError
from accel_core.storage import codec, files
from accel_core.storage.disk import Disk
from accel_core.storage.tensor_bytes import bytes_of


class Large:
    """Registered state that is too large for JSON."""

    def __init__(self):
        self.weights = torch.rand(200, 200)

    def state_dict(self):
        return {"weights": self.weights, "step": (1, float("inf")), 3: "three"}

    def load_state_dict(self, state):
        self.weights = state["weights"]


class Saved:
    def __init__(self, folder):
        torch.manual_seed(0)
        self.accelerator = Accelerator(device="cpu")
        self.model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 5])
        model, optimizer, scheduler = self.accelerator.prepare(self.model, self.optimizer, scheduler)
        self.large = Large()
        self.accelerator.register_for_checkpointing(self.large)
        self.accelerator.backward(model(torch.rand(4, 8)).sum())
        optimizer.step()
        scheduler.step()
        self.folder = self.accelerator.save_state(folder)


@pytest.fixture
def saved(tmp_path):
    made = Saved(tmp_path / "here")
    yield made
    made.accelerator.end_training()


def path_of(saved, name):
    (path,) = saved.folder.rglob(name)
    return path


# -- reading -------------------------------------------------------------------------------------


def test_a_reader_written_from_the_page_reads_it(saved):
    reader = page_reader.Reader(saved.folder)
    model = saved.model.state_dict()
    expected = {("unit0", f"model/{name}") for name in model} | {("", "registered[0] (Large)['weights']")}
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        expected |= {("unit0", f"optimizer/{name}/{key}") for key in ("exp_avg", "exp_avg_sq", "step")}
    assert reader.keys() == expected
    for name, tensor in model.items():
        assert torch.equal(torch.from_numpy(reader.tensor("unit0", f"model/{name}")), tensor)
    moments = saved.optimizer.state[saved.model[0].weight]["exp_avg"]
    assert torch.equal(torch.from_numpy(reader.tensor("unit0", "optimizer/0.weight/exp_avg")), moments)
    unit = reader.state["units"]["unit0"]
    group = reader.value(unit["optimizers"][0]["groups"][0])
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert group["betas"] == (0.9, 0.999)
    assert reader.value(unit["schedulers"][0]["state"])["milestones"] == {1: 1, 5: 1}
    registered = reader.value(reader.state["registered"][0]["state"])
    assert torch.equal(torch.from_numpy(registered["weights"]), saved.large.weights)
    assert (registered["step"], registered[3]) == ((1, float("inf")), "three")


def test_a_system_that_reads_only_where_a_file_stands_reads_it(saved, monkeypatch):
    before = {name: tensor.clone() for name, tensor in saved.model.state_dict().items()}
    with torch.no_grad():
        saved.model[0].weight.zero_()
    monkeypatch.delattr("os.preadv")
    saved.accelerator.load_state(saved.folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in saved.model.state_dict().items())


def test_the_page_names_every_tag_that_the_codec_writes():
    source = Path(codec.__file__).read_text()
    page = (Path(__file__).parents[2] / "docs" / "checkpoint-format.md").read_text()
    tags = {
        word for word in source.split('"') if word.startswith("$") and word.isascii() and word[1:].isalpha()
    }
    assert len(tags) > 12
    assert [tag for tag in tags if f"`{tag}`" not in page] == []


def test_every_tensor_is_aligned_to_its_own_item_size(tmp_path):
    accelerator, model = Accelerator(device="cpu"), nn.Linear(3, 3)
    model.register_buffer("odd", torch.ones(3, dtype=torch.uint8))
    model.register_buffer("wide", torch.ones(2, dtype=torch.float64))
    accelerator.prepare(model)
    reader = page_reader.Reader(accelerator.save_state(tmp_path / "here"))
    accelerator.end_training()
    size = {"float32": 4, "uint8": 1, "float64": 8}
    outlines, tensors = reader.ranks[0]["outlines"], reader.ranks[0]["tensors"]["unit0"].values()
    assert [start % size[outlines[number]["dtype"]] for number, start in tensors] == [0] * 4


def test_tensors_that_are_alike_share_an_outline(tmp_path):
    """An index of many small tensors is read in a third of the time."""
    accelerator, model = Accelerator(device="cpu"), nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    accelerator.prepare(model)
    reader = page_reader.Reader(accelerator.save_state(tmp_path / "here"))
    accelerator.end_training()
    outlines = [(each["shape"], each["dtype"]) for each in reader.ranks[0]["outlines"]]
    assert sorted(outlines) == [([3], "float32"), ([3, 3], "float32")]


def test_other_tools_read_the_data_file(saved):
    with safetensors.safe_open(path_of(saved, "rank-00000.safetensors"), "pt") as file:
        assert torch.equal(file.get_tensor("unit0/model/0.weight"), saved.model[0].weight)


def written(path, tensors):
    head, starts = files.lay_out(tensors)
    with path.open("wb") as file:
        record, blocks = files.write_file(file, [head, *(bytes_of(tensor) for _, tensor in tensors)])
    return record, blocks, starts


@pytest.mark.parametrize(
    "dtype", [torch.complex128, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.uint64], ids=str
)
def test_tensors_of_any_dtype_and_shape_are_written_and_read(tmp_path, dtype):
    shapes = [(), (0, 3), (5,), (2, 3)]
    tensors = [(str(shape), torch.randint(0, 2, shape).to(dtype)) for shape in shapes]
    tensors.append(("strided", torch.randint(0, 2, (4, 4)).to(dtype).t()[1:, ::2]))
    odd = ("odd", torch.ones(3, dtype=torch.uint8))
    record, blocks, starts = written(tmp_path / "data", [*tensors, odd])
    file = files.DataFile(Disk(tmp_path), "data", record)
    file.check(blocks)
    for (_, tensor), start in zip(tensors, starts[:-1], strict=True):
        found = file.tensor(str(dtype).removeprefix("torch."), tensor.shape, start)
        assert found.dtype == dtype
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    with safetensors.safe_open(tmp_path / "data", "pt") as other:
        assert len(other.keys()) == 6


def test_blocks_are_hashed_as_they_are_in_the_file(tmp_path):
    tensors = [
        ("big", torch.randn(3_000_001)),
        ("small", torch.randn(7)),
        ("bytes", torch.ones(11, dtype=torch.uint8)),
    ]
    record, blocks, _ = written(tmp_path / "data", tensors)
    content = (tmp_path / "data").read_bytes()
    assert page_reader.digest(content) == (blocks, record.digest)
    assert len(blocks) == 3
    assert record.size == len(content)


# -- damage --------------------------------------------------------------------------------------


def names(saved):
    """The manifest's name, and those of the files that it names."""
    return sorted(path.name for path in saved.folder.rglob("*") if path.is_file())


def refused(saved):
    before = {name: value.clone() for name, value in saved.model.state_dict().items()}
    with pytest.raises(CheckpointError) as found:
        saved.accelerator.run.checkpoints.load(saved.folder)
    assert all(torch.equal(before[name], value) for name, value in saved.model.state_dict().items())
    return found.value


def test_any_flipped_bit_is_found_and_its_file_is_named(saved):
    randomness, flips = random.Random(3), 0
    for name in names(saved):
        path = path_of(saved, name)
        content = path.read_bytes()
        for at in {0, 7, len(content) - 1, *(randomness.randrange(len(content)) for _ in range(40))}:
            damaged = bytearray(content)
            damaged[at] ^= 1 << randomness.randrange(8)
            path.write_bytes(damaged)
            error = refused(saved)
            assert name in str(error), f"byte {at} of {name}: {error}"
            flips += 1
        path.write_bytes(content)
    saved.accelerator.run.checkpoints.load(saved.folder)
    print(f"{flips} flips")
    assert flips > 150


@pytest.mark.parametrize("how", ["truncated", "longer", "deleted", "empty", "a folder", "a link"])
def test_a_file_that_is_not_what_was_written_is_named(saved, tmp_path, how):
    for name in names(saved):
        path = path_of(saved, name)
        content = path.read_bytes()
        path.unlink()
        if how == "truncated":
            path.write_bytes(content[:-1])
        elif how == "longer":
            path.write_bytes(content + b" ")
        elif how == "empty":
            path.touch()
        elif how == "a folder":
            path.mkdir()
        elif how == "a link":
            (tmp_path / "elsewhere").write_bytes(content)
            path.symlink_to(tmp_path / "elsewhere")
        error = refused(saved)
        is_gone = how == "deleted" and name.startswith("manifest")
        assert ("manifest-N.json is missing" if is_gone else name) in str(error)
        assert str(saved.folder) in error.path
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(content)


def test_files_of_another_save_are_named(saved, tmp_path):
    saved.large.weights += 1
    other = saved.accelerator.save_state(tmp_path / "other")
    for name in names(saved):
        mine = path_of(saved, name)
        content, (theirs,) = mine.read_bytes(), other.rglob(name)
        if not name.startswith("manifest") and content != theirs.read_bytes():
            shutil.copy(theirs, mine)
            assert name in str(refused(saved))
            mine.write_bytes(content)


def forge(saved, **members):
    """A manifest with a right checksum and these members."""
    path = path_of(saved, "manifest-*.json")
    found = {**json.loads(path.read_bytes()), **members}
    del found["checksum"]
    body = json.dumps(found, indent=2).removesuffix("\n}")
    path.write_text(f'{body},\n  "checksum": "{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n')


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_version_is_refused_and_says_which_is_known(saved, version):
    forge(saved, version=version)
    assert f"version {version}\nthis accel-core reads accel-checkpoint version 1" in str(refused(saved))


def rewrite(saved, name, change):
    """Change a JSON file and make the manifest vouch for it."""
    path = path_of(saved, name)
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))
    listed = json.loads(path_of(saved, "manifest-*.json").read_bytes())["files"]
    _, digest = page_reader.digest(path.read_bytes())
    forge(saved, files={**listed, name: {"size": path.stat().st_size, "digest": digest}})


@pytest.mark.parametrize(
    "changed",
    [
        {"place": 1 << 40},
        {"place": -8},
        {"place": 512.0},
        {"place": True},
        {"place": "512"},
        {"place": None},
        {"place": [[[0, 0], [4, 8], 1 << 40]]},
        {"place": [[[0, 0], [4, 8], -8]]},
        {"place": [[[0, 0], [4], 512]]},
        {"place": []},
        {"place": [[[0, 0], [2, 8], 512]]},
        {"place": [[[0, 0], [4, 8], 512], [[0, 0], [4, 8], 512]]},
        {"number": -1},
        {"number": 1000},
        {"number": "0"},
        {"shape": [1 << 40, 1 << 40]},
        {"shape": ["4", 8]},
        {"shape": [0, 1 << 70]},
        {"dtype": "nn"},
    ],
    ids=str,
)
def test_a_crafted_index_is_refused_before_anything_is_allocated(saved, changed):
    def craft(index):
        weight = index["tensors"]["unit0"]["model/0.weight"]
        own = {**index["outlines"][weight[0]], **changed}
        index["outlines"].append(own)
        weight[:] = own.pop("number", len(index["outlines"]) - 1), own.pop("place", weight[1])

    rewrite(saved, "rank-00000.json", craft)
    told = str(refused(saved))
    assert str(saved.folder) in told
    assert "could not be restored" not in told


def test_a_crafted_state_is_refused(saved):
    rewrite(saved, "state.json", lambda state: state["registered"][0].update(state={"$pickle": "Y29z"}))
    assert "registered object 0 (Large): $pickle is unknown or malformed" in str(refused(saved))


def test_what_was_never_a_checkpoint_is_said(saved, tmp_path):
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint: manifest-N\.json is missing"):
            saved.accelerator.run.checkpoints.load(folder)


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 4)[::4, ::4], torch.ones(()).expand(1, 1), torch.ones(3, 1)[:, :0]]
)
def test_a_single_element_is_read_whatever_its_stride(tensor):
    """torch calls it contiguous, and views it as bytes only where its stride is 1."""
    assert bytes(bytes_of(tensor)) == tensor.numpy().tobytes()
