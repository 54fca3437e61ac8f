"""What disks, clocks, people and attackers do to checkpoints: nothing wrong is loaded, nothing good is lost.

test_checkpoint_format has what flips and forges one checkpoint; here are several, and those who craft one.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import pickle
import random
import shutil
import sys
from pathlib import Path

import page_reader
import pytest
import torch
import xxhash
from lookup import file_in, home_of, manifest_in
from series_job import Job
from torch import nn
from torch.utils.data import DataLoader

from accel_core import Accelerator
from accel_core.errors import CheckpointError
from accel_core.storage import disk
from accel_core.storage.disk import Disk
from accel_core.storage.files import DataFile
from accel_core.storage.opened import Opened, open_checkpoint
from accel_core.storage.tensors import Checkpoint

FILES = ["manifest.json", "rank-00000.json", "rank-00000.safetensors", "state.json"]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    for value in range(3):
        made.save(value)
    yield made
    made.accelerator.end_training()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def loaded_after(job, caplog):
    """What is loaded, and what is said of the one that was passed over."""
    caplog.clear()
    value = job.load()
    return value, [record.getMessage() for record in caplog.records]


def seal(path, members):
    """Write a manifest with a right checksum."""
    members.pop("checksum", None)
    body = json.dumps(members, indent=2).removesuffix("\n}")
    path.write_text(f'{body},\n  "checksum": "{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n')


def rewrite(folder, name, change):
    """Change a JSON file and make the manifest vouch for it, as one who knows the format can."""
    path, manifest = file_in(folder, name), manifest_in(folder)
    members = json.loads(manifest.read_bytes())
    content = members if name == "manifest.json" else json.loads(path.read_bytes())
    change(content)
    if name != "manifest.json":
        path.write_text(json.dumps(content))
        _, digest = page_reader.digest(path.read_bytes())
        members["files"][name] = {"size": path.stat().st_size, "digest": digest}
    seal(manifest, members)


# -- damage: the one before is taken --------------------------------------------------------------


def test_a_byte_flipped_in_each_file_in_turn(job, folder, caplog):
    for name in FILES:
        path = file_in(folder / "checkpoint_2", name)
        content = path.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[at] ^= 0x10
            path.write_bytes(changed)
            value, (said,) = loaded_after(job, caplog)
            assert value == 1
            assert str(path) in said
        path.write_bytes(content)
    assert job.load() == 2


def test_two_files_that_changed_places(job, folder, caplog):
    home = home_of(folder / "checkpoint_2")
    one, other = home / "rank-00000.json", home / "state.json"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    value, (said,) = loaded_after(job, caplog)
    assert value == 1
    assert "state.json is damaged" in said


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_of_another_save(job, folder, caplog, name):
    target, source = (file_in(folder / each, name) for each in ("checkpoint_2", "checkpoint_1"))
    same = target.read_bytes() == source.read_bytes()
    shutil.copy(source, target)
    value, said = loaded_after(job, caplog)
    assert value == 2 if same else (value == 1 and f"{target} is damaged" in said[0])


def test_the_manifest_of_another_save(job, folder, caplog):
    shutil.copy(manifest_in(folder / "checkpoint_1"), manifest_in(folder / "checkpoint_2"))
    value, (said,) = loaded_after(job, caplog)
    assert value == 1
    assert "checkpoint_2 holds no whole save of this number" in said
    with pytest.raises(CheckpointError, match=r"checkpoint_2/save-.* is damaged: it is not there"):
        job.load(folder / "checkpoint_2")


def test_one_of_a_newer_version_is_not_passed_over_for_an_older_one(job, folder):
    rewrite(folder / "checkpoint_2", "manifest.json", lambda members: members.update(version=2))
    with pytest.raises(CheckpointError, match="is of format accel-checkpoint version 2\nthis"):
        job.load()


def test_a_manifest_that_is_a_link_is_not_followed(job, folder, caplog):
    manifest = manifest_in(folder / "checkpoint_2")
    manifest.rename(manifest.with_name("elsewhere"))
    manifest.symlink_to("elsewhere")
    value, (said,) = loaded_after(job, caplog)
    assert value == 1
    assert f"{manifest} is damaged: it is not a file" in said


HUGE = {"size": 10**12, "readers": 1}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", lambda members: members.update(iteration=float("inf"))),
        ("manifest.json", lambda members: members["files"]["state.json"].update(size=float("inf"))),
        ("manifest.json", lambda members: members["world"].update(size=10**12)),
        (
            "manifest.json",
            lambda members: members.update(world={"size": 10**12, "readers": 1}, domains=[[0]]),
        ),
        ("rank-00000.json", lambda members: weight_of(members).__setitem__(1, [[[0.5], [1], 0]])),
        ("rank-00000.json", lambda members: weight_of(members).__setitem__(1, 1e300)),
        ("rank-00000.json", lambda members: weight_of(members).__setitem__(0, 1e300)),
        ("rank-00000.json", lambda members: outline_of(members).update(dtype="bits8")),
        ("rank-00000.json", lambda members: outline_of(members).update(dtype="quint8")),
    ],
)
def test_numbers_that_nobody_writes_are_damage(job, folder, caplog, name, change):
    rewrite(folder / "checkpoint_2", name, change)
    value, (said,) = loaded_after(job, caplog)
    assert value == 1
    assert f"{file_in(folder / 'checkpoint_2', name)} is damaged: it cannot be understood" in said


def weight_of(members):
    return members["tensors"]["unit0"]["model/weight"]


def outline_of(members):
    return members["outlines"][weight_of(members)[0]]


# -- reading -----------------------------------------------------------------------------------------


def failing(monkeypatch, number, name):
    """Reading what has this in its path fails."""
    read = os.preadv

    def fails(handle, buffers, start):
        if name in str(Path(f"/proc/self/fd/{handle}").readlink()):
            raise OSError(number, os.strerror(number))
        return read(handle, buffers, start)

    monkeypatch.setattr(os, "preadv", fails)


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a file is told by its handle")


@needs_proc
@pytest.mark.parametrize("name", FILES[1:])
def test_a_disk_that_cannot_read_a_file_has_damaged_it(job, folder, caplog, monkeypatch, name):
    path = file_in(folder / "checkpoint_2", name)
    failing(monkeypatch, errno.EIO, str(path))
    value, (said,) = loaded_after(job, caplog)
    assert value == 1
    assert f"{path} is damaged: it cannot be read ([Errno 5]" in said


@needs_proc
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_what_cannot_be_read_now_costs_no_progress(job, folder, monkeypatch, number):
    failing(monkeypatch, number, str(file_in(folder / "checkpoint_2", "rank-00000.safetensors")))
    with pytest.raises(CheckpointError, match="it may be whole, so no older one is taken instead"):
        job.load()
    monkeypatch.undo()
    assert job.load() == 2


def test_a_file_that_is_cut_while_it_is_read_is_damaged(job, folder, caplog, monkeypatch):
    verify = Opened.verify

    def cut(checkpoint, blocks):
        if checkpoint.place.name == "checkpoint_2":
            os.truncate(file_in(folder / "checkpoint_2", "rank-00000.safetensors"), 10)
        verify(checkpoint, blocks)

    monkeypatch.setattr(Opened, "verify", cut)
    value, said = loaded_after(job, caplog)
    assert value == 1
    assert "rank-00000.safetensors is damaged: it cannot be read (it ends after 10 bytes)" in said[0]


def test_one_that_is_replaced_while_it_is_opened_is_opened_anew(job, tmp_path, monkeypatch):
    target = tmp_path / "best"
    job.save(5, target)
    content_of, times = DataFile.content, []

    def replaced(file):
        if not times:
            times.append(1)
            job.save(6, target)
        return content_of(file)

    monkeypatch.setattr(DataFile, "content", replaced)
    assert job.load(target) in (5, 6)
    assert job.load(target) == 6


def test_one_that_is_replaced_after_it_was_opened_is_read_to_its_end(job, tmp_path):
    target = tmp_path / "best"
    job.save(5, target)
    with open_checkpoint(Disk(target)) as opened:
        job.save(6, target)
        job.save(7, target)
        checkpoint = Checkpoint.with_tensors(opened)
        checkpoint.verify(checkpoint.blocks)
        assert checkpoint.tensors["unit0", "model/weight"].tensor().item() == 5
    job.save(8, target)
    assert len([*target.iterdir()]) == 2, "a reader's claim ends with it"


def test_more_files_than_are_held_open_are_read(job, folder, monkeypatch):
    monkeypatch.setattr(disk, "OPEN_FILES", 1)
    assert job.load() == 2


# -- disks ---------------------------------------------------------------------------------------


def obey_permissions() -> None:
    """Give up root's right to write what its owner may not. Its right to read stays: imports need it."""
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    sets[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def save_where_nobody_may_write(folder: str) -> tuple[str, list[str], float]:
    """Two saves into a folder that becomes read-only after the first."""
    obey_permissions()
    job = Job(folder, total_limit=1)
    job.save(1)
    where = Path(folder) / "checkpoints"
    where.chmod(0o555)
    try:
        job.save(2)
        said = "saved"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    value = job.load()
    where.chmod(0o755)
    found = said, sorted(path.name for path in where.iterdir()), value
    job.accelerator.end_training()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="gives up a capability as Linux has it")
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.needs("accel-ddp"))])
def test_a_folder_that_has_become_read_only(world, tmp_path, run_processes):
    for said, left, value in run_processes(save_where_nobody_may_write, str(tmp_path), world=world):
        assert "Permission denied" in said
        assert "checkpoint_1" in said
        assert (left, value) == (["checkpoint_0"], 1)


# -- those who craft one -------------------------------------------------------------------------


class Anything:
    """Registered state that takes whatever comes."""

    def state_dict(self):
        return {"here": 1}

    def load_state_dict(self, state):
        self.state = state


class Saved:
    def __init__(self, folder):
        torch.manual_seed(0)
        self.accelerator = Accelerator(device="cpu")
        self.model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        model, optimizer, _ = self.accelerator.prepare(self.model, optimizer, scheduler)
        self.anything = Anything()
        self.accelerator.register_for_checkpointing(self.anything)
        self.accelerator.backward(model(torch.rand(4, 4)).sum())
        optimizer.step()
        self.folder = self.accelerator.save_state(folder)

    def state(self):
        return [tensor.clone() for tensor in self.model.state_dict().values()]

    def refused(self):
        before = self.state()
        with pytest.raises(CheckpointError) as found:
            self.accelerator.load_state(self.folder)
        assert all(map(torch.equal, before, self.state()))
        assert not hasattr(self.anything, "state")
        return str(found.value)


@pytest.fixture
def saved(tmp_path):
    made = Saved(tmp_path / "here")
    yield made
    made.accelerator.end_training()


class Evil:
    def __reduce__(self):
        return os.system, ("touch RAN",)


PICKLE = base64.b64encode(pickle.dumps(Evil())).decode()
LEVELS = 500 if sys.version_info < (3, 12) else 1200  # a list within a list takes one call since then
DEEP = json.loads("[" * LEVELS + "]" * LEVELS)


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": PICKLE},
        {"$object": PICKLE},
        {"$reduce": ["os.system", ["touch RAN"]]},
        {"$array": ["|O", [1], PICKLE]},
        {"$array": ["(1000000000,)<f8", [1], ""]},
        {"$array": ["<f8,<O", [1], ""]},
        {"$array": ["<f8", [1 << 62], ""]},
        {"$array": ["<f8", [-1, 1 << 62], ""]},
        {"$scalar": ["<U1000000000", [], "AAAA"]},
        {"$tensor": ["float32", [1 << 40, 1 << 40], ""]},
        {"$tensor": ["float32", [0, 1 << 70], ""]},
        {"$tensor": ["float32", [-1], "AAAA"]},
        {"$tensor": ["__class__", [1], "AAAA"]},
        {"$tensor": ["load", [1], "AAAA"]},
        {"$stored": "not/there"},
        {"$stored": {"$tuple": []}},
        {"$dtype": "__builtins__"},
        {"$device": "os.system"},
        {"$deque": [1 << 70, []]},
        {"$counter": [["a", {"$tuple": []}, 3]]},
        {"$set": [[]]},
        {"$dict": [[[], 1]]},
        {"$size": ["a"]},
        {"$complex": ["os"]},
        {"$bytes": "\u00e9"},
        {"$float": "one"},
        DEEP,
    ],
    ids=lambda value: str(value)[:48],
)
def test_a_crafted_value_is_refused_and_nothing_of_it_runs(saved, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change(state):
        state["registered"][0]["state"] = {"here": value}

    rewrite(saved.folder, "state.json", change)
    assert "registered object 0 (Anything)" in saved.refused()
    assert not (tmp_path / "RAN").exists()


def test_pickled_bytes_stay_bytes(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change(state):
        state["registered"][0]["state"] = {"here": {"$bytes": PICKLE}}

    rewrite(saved.folder, "state.json", change)
    saved.accelerator.load_state(saved.folder)
    assert saved.anything.state == {"here": pickle.dumps(Evil())}
    assert not (tmp_path / "RAN").exists()


NO_STATES = [
    {"python": None},
    {"torch": {"$tensor": ["uint8", [3], "AAAA"]}},
    {"torch": 3},
    {"torch": {"$tensor": ["uint8", [5056], "A" * 6740 + "AA=="]}},
    [],
]


def test_a_state_that_is_none_of_a_loaders_generator_is_named_with_the_loader(saved):
    data = DataLoader(torch.arange(4.0), shuffle=True, generator=torch.Generator())
    saved.accelerator.prepare(data)
    saved.accelerator.save_state(saved.folder)

    def change(rank):
        rank["state"]["loaders"][0]["generators"]["loader"] = "AAAA"

    rewrite(saved.folder, "rank-00000.json", change)
    assert "dataloader 0 could not be restored, and may be half loaded: RuntimeError" in saved.refused()


@pytest.mark.parametrize("name", FILES)
def test_json_that_is_nested_without_end_is_damage(saved, name):
    path = file_in(saved.folder, name)
    if path.suffix == ".json":
        content = b"[" * 200_000
        path.write_bytes(content)
        if name != "manifest.json":
            _, digest = page_reader.digest(content)
            record = {"size": len(content), "digest": digest}
            rewrite(saved.folder, "manifest.json", lambda members: members["files"].update({name: record}))
        assert f"{path} is damaged: it cannot be understood" in saved.refused()


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {}},
        {"files": {"state.json": {"size": -1, "digest": "0"}}},
        {"files": {"state.json": {"size": "many", "digest": "0"}}},
        {"files": {"../../etc/passwd": {"size": 1, "digest": "0"}}},
        {"files": []},
        {"world": {"size": 0, "readers": 1}},
        {"world": {"size": -1, "readers": 1}},
        {"world": {"size": 1 << 60, "readers": 1}},
        {"world": {"size": 1}},
        {"world": {}},
        {"world": "one"},
        {"lineage": 3},
    ],
    ids=str,
)
def test_a_crafted_manifest_is_refused(saved, changed):
    rewrite(saved.folder, "manifest.json", lambda members: members.update(changed))
    assert str(saved.folder) in saved.refused()


@pytest.mark.parametrize("name", ["../outside.json", "/etc/passwd", "a/../../b"])
def test_a_manifest_cannot_name_files_elsewhere(saved, name):
    record = {"size": 1, "digest": "0"}
    rewrite(saved.folder, "manifest.json", lambda members: members["files"].update({name: record}))
    assert "manifest-00000001.json is damaged" in saved.refused()


@pytest.mark.parametrize("name", FILES[1:])
def test_a_link_is_not_followed_even_to_the_right_content(saved, tmp_path, name):
    path = file_in(saved.folder, name)
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert f"{path} is damaged" in saved.refused()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_the_place_of_a_file_does_not_make_it_wait(saved, name):
    path = file_in(saved.folder, name)
    path.unlink()
    os.mkfifo(path)
    assert str(saved.folder) in saved.refused()


def test_a_manifest_of_gigabytes_is_not_read(saved):
    with manifest_in(saved.folder).open("r+b") as file:
        file.truncate(1 << 34)
    assert "manifest-00000001.json is damaged" in saved.refused()


def test_whatever_forged_files_say_they_run_nothing_and_what_is_good_loads_after(saved):
    """Random values in random places of all JSON files, each time with right digests.

    Digests do not stop one who forges them: then what loads is what he wrote. It is data, and what is
    no state of this run raises CheckpointError.
    """
    randomness, refused, loaded = random.Random(7), 0, 0
    original = {path: path.read_bytes() for path in (file_in(saved.folder, name) for name in FILES)}
    odd = [None, True, -1, 1 << 64, 1.5, "", "x", "../x", [], {}, [[]], {"$tuple": [1]}, {"$nothing": 1}]

    def change(node):
        key = randomness.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], (dict, list)) and node[key] and randomness.random() < 0.8:
            change(node[key])
        elif isinstance(node, dict) and randomness.random() < 0.2:
            del node[key]
        else:
            node[key] = randomness.choice(odd)

    for _ in range(200):
        rewrite(saved.folder, randomness.choice(["manifest.json", "state.json", "rank-00000.json"]), change)
        try:
            saved.accelerator.load_state(saved.folder)
            loaded += 1
        except CheckpointError:
            refused += 1
        for each, content in original.items():
            each.write_bytes(content)
    saved.accelerator.load_state(saved.folder)
    assert refused > 50
    assert loaded > 10
