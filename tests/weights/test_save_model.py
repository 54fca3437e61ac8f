"""A model's weights in files that other libraries load, and never half of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from accel_core import Accelerator, AccelError, CheckpointError, ConfigError
from accel_core.checkpoint.weight_files import bytes_in, write_weights


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True)
    yield made
    made.end_training()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class WithExtra(nn.Linear):
    extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Equal(nn.Linear):
    """Compares as equal to any of its kind."""

    __hash__ = nn.Linear.__hash__

    def __eq__(self, other):
        return isinstance(other, Equal)


def read(folder):
    """As `from_pretrained` finds the weights."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# -- what is written -----------------------------------------------------------------------------


def test_a_model_is_one_file_that_plain_torch_loads(accelerator, tmp_path):
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))

    accelerator.save_model(model, tmp_path / "new" / "folder")

    assert names(tmp_path / "new" / "folder") == ["model.safetensors"]
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    other.load_state_dict(load_file(tmp_path / "new" / "folder" / "model.safetensors"))
    assert same(other.state_dict(), accelerator.unwrap_model(model).state_dict())


def test_a_larger_model_is_several_files_and_an_index(accelerator, tmp_path):
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))

    accelerator.save_model(model, tmp_path, max_shard_size="0.8KB")

    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names(tmp_path) == [*shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 400}
    assert list(index["weight_map"].values()) == [shards[0], shards[0], shards[1], shards[1], shards[2]]
    assert same(read(tmp_path), model.state_dict())


def test_a_weight_larger_than_a_file_has_one_of_its_own(accelerator, tmp_path):
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(100, 100), nn.Linear(2, 1))

    accelerator.save_model(model, tmp_path, max_shard_size=1000)

    sizes = [len(load_file(tmp_path / file)) for file in names(tmp_path) if file.endswith("safetensors")]
    assert sizes == [2, 1, 3]


@pytest.mark.parametrize(
    ("size", "meant"), [(7, 7), ("7", 7), ("5MB", 5_000_000), ("1.5 KiB", 1536), ("10GB", 10_000_000_000)]
)
def test_sizes_are_written_as_people_do(size, meant):
    assert bytes_in(size) == meant


@pytest.mark.parametrize("size", ["a lot", "", 0, "0GB", True])
def test_a_size_that_is_none_is_refused(accelerator, tmp_path, size):
    with pytest.raises(ConfigError, match=f"max_shard_size={size!r} is not a size"):
        accelerator.save_model(nn.Linear(1, 1), tmp_path, max_shard_size=size)


def test_tied_weights_are_there_once_under_their_first_name(accelerator, tmp_path):
    model = accelerator.prepare(Tied())

    accelerator.save_model(model, tmp_path)

    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(
        name for name in model.state_dict() if name != "head.weight"
    )
    other = Tied()
    assert load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert same(other.state_dict(), model.state_dict())


def test_without_safetensors_it_is_what_torch_save_writes_and_holds_no_code(accelerator, tmp_path):
    model = accelerator.prepare(Tied())

    accelerator.save_model(model, tmp_path, safe_serialization=False)

    assert names(tmp_path) == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert same(found, model.state_dict())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()


def test_each_model_of_a_unit_has_its_own_names(accelerator, tmp_path):
    one, two = nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    two[0].weight = one.weight
    optimizer = torch.optim.SGD(list({*one.parameters(), *two.parameters()}), lr=0.1)
    first, second, _ = accelerator.prepare(one, two, optimizer)

    for number, model in enumerate((first, second)):
        accelerator.save_model(model, tmp_path / str(number))
        assert same(load_file(tmp_path / str(number) / "model.safetensors"), model.state_dict())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch.compile, which looks at everything
def test_what_wraps_a_part_leaves_no_trace_in_names(accelerator, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.BatchNorm1d(2), backend="eager"))

    accelerator.save_model(accelerator.prepare(model), tmp_path)

    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    plain.load_state_dict(accelerator.get_state_dict(model))


def test_views_are_written_alone_and_buffers_that_share_memory_twice(accelerator, tmp_path):
    model = nn.Linear(10, 10)
    model.weight.data = torch.rand(10, 10).t()
    model.register_buffer("view", torch.rand(100_000)[7:9])
    model.register_buffer("one", torch.rand(3))
    model.register_buffer("other", model.one)

    for safe in (True, False):
        accelerator.save_model(model, tmp_path / str(safe), safe_serialization=safe)

    assert same(load_file(tmp_path / "True" / "model.safetensors"), model.state_dict())
    assert all(path.stat().st_size < 10_000 for path in tmp_path.glob("*/*"))


def test_extra_state_that_is_a_tensor_goes_along(accelerator, tmp_path):
    model = nn.Sequential(WithExtra(2, 2))
    model[0].extra = torch.arange(3)

    accelerator.save_model(model, tmp_path)

    other = nn.Sequential(WithExtra(2, 2))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other[0].extra, torch.arange(3))


def test_extra_state_that_is_none_is_refused_by_name(accelerator, tmp_path):
    model = nn.Sequential(WithExtra(2, 2))
    model[0].extra = {"a": 1}

    with pytest.raises(CheckpointError, match=r"safetensors cannot hold this object: .*0\._extra_state"):
        accelerator.save_model(model, tmp_path)
    accelerator.save_model(model, tmp_path, safe_serialization=False)


def test_what_safetensors_cannot_say_is_refused_with_the_remedy(accelerator, tmp_path):
    model = nn.ParameterList([torch.zeros(2, dtype=torch.complex128)])

    with pytest.raises(
        CheckpointError, match="safetensors cannot hold this object: torch.complex128\nsave with"
    ):
        accelerator.save_model(model, tmp_path)
    assert names(tmp_path) == []


# -- what was there before -----------------------------------------------------------------------

LAYOUTS = {1: 10_000, 2: 1_200, 3: 800}
"""Number of files -> the limit that gives it, for the model below."""


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_files_of_an_earlier_save_are_gone_and_others_are_not(accelerator, tmp_path, before, after):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00009.bin").write_text("not ours")
    left = tmp_path / "save-0123456789abcdef"  # of a save whose process was killed
    left.mkdir()
    (left / "0").touch()

    accelerator.save_model(model_of(0), tmp_path, max_shard_size=LAYOUTS[before])
    accelerator.save_model(model_of(1), tmp_path, max_shard_size=LAYOUTS[after])

    assert len(names(tmp_path)) == 2 + (after if after == 1 else after + 1)
    assert same(read(tmp_path), model_of(1).state_dict())


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_killed_at_any_change_of_a_name_a_reader_finds_one_save_or_an_error(
    accelerator, tmp_path, monkeypatch, before, after
):
    old, new = model_of(0).state_dict(), model_of(1).state_dict()
    changes = {name: getattr(Path, name) for name in ("replace", "unlink")}
    outcomes = []
    for kill in range(40):
        folder = tmp_path / str(kill)
        accelerator.save_model(model_of(0), folder, max_shard_size=LAYOUTS[before])
        left = [kill]

        def change(path, *where, left=left, name, **options):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return changes[name](path, *where, **options)

        for name in changes:
            monkeypatch.setattr(Path, name, lambda *a, name=name, **b: change(*a, name=name, **b))
        try:
            accelerator.save_model(model_of(1), folder, max_shard_size=LAYOUTS[after])
            outcomes.append("done")
        except KeyboardInterrupt:
            outcomes.append("killed")
        finally:
            monkeypatch.undo()
        try:
            found = read(folder)
        except FileNotFoundError:
            assert before == after > 1, "only where names are the same there is an instant without"
        else:
            assert same(found, new) or (outcomes[-1] == "killed" and same(found, old))
        if outcomes[-1] == "done":
            break
    assert outcomes[-1] == "done"
    assert len(outcomes) > 1


def test_a_save_that_fails_leaves_the_earlier_one_alone(accelerator, tmp_path, monkeypatch):
    accelerator.save_model(model_of(0), tmp_path, max_shard_size=800)
    before = names(tmp_path)

    def full(file):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            accelerator.save_model(model_of(1), tmp_path, max_shard_size=800)

    assert names(tmp_path) == before
    assert same(read(tmp_path), model_of(0).state_dict())


def test_weights_that_readers_would_not_look_at_are_not_written(accelerator, tmp_path):
    accelerator.save_model(model_of(0), tmp_path)

    with pytest.raises(CheckpointError, match="which readers take instead of pytorch_model.bin\nsave to"):
        accelerator.save_model(model_of(1), tmp_path, safe_serialization=False)


# -- in memory -----------------------------------------------------------------------------------


def test_the_state_dict_is_that_of_the_users_own_model(accelerator):
    model = nn.Sequential(Tied(), WithExtra(2, 2))
    model[1].extra = (1, 2)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    found = accelerator.get_state_dict(prepared)

    expected = model.state_dict()
    assert found.pop("1._extra_state") == expected.pop("1._extra_state")
    assert same(found, expected)


def test_weights_come_one_by_one_and_floating_ones_in_the_dtype_asked_for(accelerator):
    model = accelerator.prepare(Tied())

    found = dict(accelerator.iter_weights(model, dtype=torch.bfloat16))

    assert "head.weight" not in found
    assert found["embedding.weight"].dtype is torch.bfloat16
    assert found["norm.num_batches_tracked"].dtype is torch.int64


def test_parameters_are_whole_inside_a_context(accelerator):
    model = accelerator.prepare(Tied())
    asked = []
    accelerator.run.units[0].hooks.full_parameters = lambda unit, names, writeback: asked.append(
        (names, writeback)
    )

    accelerator.full_parameters(model)
    accelerator.full_parameters(model, ["head.weight"], writeback=True)

    assert asked == [(["embedding.weight", "norm.weight", "norm.bias"], False), (["embedding.weight"], True)]
    with pytest.raises(AccelError, match="has no parameter 'norm.wight'; did you mean 'norm.weight'?"):
        accelerator.full_parameters(model, ["norm.wight"])


def test_natively_parameters_are_whole_already(accelerator):
    model = accelerator.prepare(nn.Linear(1, 1))

    with accelerator.full_parameters(model, writeback=True):
        nn.init.constant_(model.weight, 3)

    assert model.weight.item() == 3


# -- several at once, and disks ----------------------------------------------------------------------


def test_savers_of_one_folder_leave_each_others_files_alone(accelerator, tmp_path):
    failed = []
    states = [model_of(seed).state_dict() for seed in (0, 1)]  # seeds are of all threads

    def save(state):
        for _ in range(20):
            weights = [([name], each) for name, each in state.items()]
            try:
                write_weights(tmp_path, weights, {}, 10_000, safe=True)
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=save, args=(state,)) for state in states]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert names(tmp_path) == ["model.safetensors"]
    assert any(same(read(tmp_path), state) for state in states)


@pytest.mark.parametrize("safe", [True, False])
def test_files_have_the_mode_that_new_files_have(accelerator, tmp_path, safe):
    before = os.umask(0o027)
    try:
        accelerator.save_model(model_of(0), tmp_path / "out", safe_serialization=safe)
    finally:
        os.umask(before)
    (file,) = (tmp_path / "out").iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("safe", [True, False])
def test_a_full_disk_is_said_and_the_earlier_save_stays(tmp_path, safe, run_processes):
    assert run_processes(fill_the_disk, str(tmp_path), safe, world=1) == ["told"]


def fill_the_disk(folder, safe):
    folder = f"{folder}/folder"
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model_of(0), folder, safe_serialization=safe)
    before = names(Path(folder))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for save in (
        lambda: accelerator.save_model(model_of(1), folder, safe_serialization=safe),
        lambda: accelerator.save(model_of(1).state_dict(), f"{folder}/object", safe_serialization=safe),
    ):
        with pytest.raises(CheckpointError, match=r"(folder|object) could not be written"):
            save()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert names(Path(folder)) == before
    accelerator.end_training()
    return "told"


def test_a_file_where_a_folder_is_meant_is_named(accelerator, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file could not be written: NotADirectoryError"):
        accelerator.save_model(model_of(0), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def equals(accelerator):
    """Two models of one unit that compare as equal."""
    models = [Equal(2, 2), Equal(2, 2)]
    optimizer = torch.optim.SGD([each.weight for each in models], lr=0.1)
    *prepared, _ = accelerator.prepare(*models, optimizer)
    return prepared


def test_of_models_that_compare_as_equal_each_has_its_own_weights(accelerator, equals):
    found = accelerator.get_state_dict(equals[1])
    assert torch.equal(found["weight"], equals[1].weight)


def test_of_models_that_compare_as_equal_only_the_one_kept_apart_is_not_saved(accelerator, equals, tmp_path):
    accelerator.run.exclude_from_checkpoints(equals[1:])
    accelerator.save_state(tmp_path / "saved")
    index = json.loads(next((tmp_path / "saved").glob("save-*/rank-00000.json")).read_text())
    names = [key for key in index["tensors"]["unit0"] if key.startswith("model/")]
    assert sorted(names) == ["model/0.bias", "model/0.weight"]
