"""One commit: a checkpoint is the newest whole manifest and what it names, and nothing else is looked at."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import engine
import pytest
import torch

from accel_core.errors import CheckpointError
from accel_core.storage import disk
from accel_core.storage import opened as opening
from accel_core.storage.commit import begin, commits, manifests, prune, read_manifest
from accel_core.storage.disk import Disk
from accel_core.storage.files import DamagedError, UnreadableError
from accel_core.storage.leaves import Key
from accel_core.storage.opened import open_checkpoint
from accel_core.storage.series import Numbering, Series
from accel_core.storage.write import Outline, write_checkpoint


@pytest.fixture
def place(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "here")


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# -- what counts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 100, -2, -1])
def test_a_torn_manifest_of_a_newer_number_is_passed_over_for_the_whole_one_before(
    place: Disk, length: int
) -> None:
    """Where a file system has no other way, a manifest is written in place."""
    engine.save(place, 1.0)
    content = (place.path / "manifest-00000001.json").read_bytes()
    (place.path / "manifest-00000002.json").write_bytes(content[:length] if length else b"")
    assert engine.value_in(place) == 1.0
    assert read_manifest(place).number == 1
    assert [each.number for each in manifests(place)] == [1]
    engine.save(place, 2.0)
    assert engine.value_in(place) == 2.0
    assert [*commits(place)] == [3]


def test_a_torn_manifest_is_no_checkpoint_by_itself(place: Disk) -> None:
    place.path.mkdir()
    (place.path / "manifest-00000001.json").write_bytes(b"{")
    with pytest.raises(DamagedError, match=r"manifest-00000001\.json is damaged"):
        read_manifest(place)


def test_no_older_one_is_taken_for_a_manifest_of_a_later_version(place: Disk) -> None:
    engine.save(place, 1.0)
    content = (place.path / "manifest-00000001.json").read_bytes()
    newer = content.replace(b'"version": 1', b'"version": 2')
    (place.path / "manifest-00000002.json").write_bytes(newer)
    with pytest.raises(UnreadableError, match="version 2"):
        read_manifest(place)


def test_every_flipped_byte_is_found_or_means_nothing(place: Disk) -> None:
    engine.Engine().save(place, {"w": torch.arange(6.0).view(2, 3), "n": torch.tensor(3)}, {"step": (1, 2)})
    tensors, plain = engine.load(place)
    refused = 0
    for path in files_in(place.path):
        content = path.read_bytes()
        for at in range(len(content)):
            changed = bytearray(content)
            changed[at] ^= 1 << at % 8
            path.write_bytes(changed)
            if (loaded := loaded_or_refused(place, path.name)) is None:
                refused += 1
                continue
            found, value = loaded
            assert value == plain
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[key], tensors[key]) for key in tensors)
        path.write_bytes(content)
    assert refused > 1000


def loaded_or_refused(place: Disk, name: str) -> tuple[dict[str, torch.Tensor], object] | None:
    """What is loaded; None if the file of this name is refused."""
    try:
        return engine.load(place)
    except CheckpointError as error:
        told = str(error)
    assert name in told
    return None


def test_files_that_no_manifest_names_are_never_looked_at(place: Disk) -> None:
    engine.save(place, 1.0)
    (place.path / "notes.txt").write_text("mine")
    (place.path / "manifest.json").write_text("not a manifest")
    (place.path / "save-of-the-day").mkdir()
    (place.path / "save-of-the-day" / "file").write_text("mine too")
    engine.save(place, 2.0)
    assert engine.value_in(place) == 2.0
    assert (place.path / "notes.txt").read_text() == "mine"
    assert (place.path / "save-of-the-day" / "file").read_text() == "mine too"


def test_a_folder_that_holds_something_else_is_refused(place: Disk) -> None:
    place.path.mkdir()
    (place.path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint.* it was left as it is"):
        begin(place)


# -- the commit -------------------------------------------------------------------------------------------


class Late(Disk):
    """A store that answers a creation with an error though it has succeeded."""

    error: OSError

    def at(self, name: str) -> Disk:
        return Disk(self.path / name)

    def create(self, name: str, content: bytes) -> None:
        super().create(name, content)
        raise self.error


@pytest.mark.parametrize(
    "error", [FileExistsError(errno.EEXIST, "exists"), TimeoutError(errno.ETIMEDOUT, "no answer")], ids=repr
)
def test_a_create_that_answers_an_error_after_it_succeeded_is_a_success(place: Disk, error: OSError) -> None:
    late = Late(place.path)
    late.error = error
    for value in (1.0, 2.0):
        engine.save(late, value)
        assert engine.value_in(place) == value
    assert len([*place.path.iterdir()]) == 2


class Refusing(Late):
    """A store that creates nothing."""

    def create(self, name: str, content: bytes) -> None:
        raise self.error


def test_a_create_that_failed_is_a_failure_and_leaves_the_checkpoint_before(place: Disk) -> None:
    engine.save(place, 1.0)
    refusing = Refusing(place.path)
    refusing.error = OSError(errno.EDQUOT, "no quota")
    with pytest.raises(CheckpointError, match="no quota"):
        engine.save(refusing, 2.0)
    assert engine.value_in(place) == 1.0
    assert len([*place.path.iterdir()]) == 2


class Overtaken(Late):
    """A disk on which another saver commits just before."""

    def create(self, name: str, content: bytes) -> None:
        engine.save(Disk(self.path), 9.0)
        super(Late, self).create(name, content)


def test_of_two_saves_that_commit_at_once_one_wins_and_the_other_says_so(place: Disk) -> None:
    with pytest.raises(CheckpointError, match="has appeared while this save was written: another run"):
        engine.save(Overtaken(place.path), 1.0)
    with pytest.raises(CheckpointError, match="has changed while this save was written: another run"):
        engine.save(Overtaken(place.path), 2.0)
    assert engine.value_in(place) == 9.0
    assert len([*place.path.iterdir()]) == 2


# -- removal ----------------------------------------------------------------------------------------------


def test_what_a_reader_has_open_stays_until_it_is_done(place: Disk) -> None:
    engine.save(place, 1.0)
    with open_checkpoint(place) as opened:
        engine.save(place, 2.0)
        opened.verify(opened.blocks)
        assert (place.path / opened.manifest.save_id).is_dir()
    assert engine.value_in(place) == 2.0
    engine.save(place, 3.0)
    assert len([*place.path.iterdir()]) == 2


def test_a_reader_whose_checkpoint_was_replaced_before_it_was_open_takes_the_new_one(
    place: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save(place, 1.0)
    replacements = [2.0, 3.0]

    def overtaken(place: Disk) -> object:
        manifest = read_manifest(place)
        if replacements:
            engine.save(place, replacements.pop(0))
        return manifest

    monkeypatch.setattr(opening, "read_manifest", overtaken)
    assert engine.value_in(place) == 3.0


def test_a_checkpoint_that_a_reader_has_open_is_passed_over_by_the_limit(tmp_path: Path) -> None:
    folder = Disk(tmp_path / "checkpoints")
    series: Series = engine.series_in(folder, limit=1)
    first = engine.save(None, 1.0, series=series)
    with open_checkpoint(first) as opened:
        engine.save(None, 2.0, series=series)
        opened.verify(opened.blocks)
        assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoint_0", "checkpoint_1"]
        assert engine.value_in(first) == 1.0
    engine.save(None, 3.0, series=series)
    assert [path.name for path in folder.path.iterdir()] == ["checkpoint_2"]


def test_nothing_is_pruned_where_a_manifest_cannot_be_read(place: Disk, caplog) -> None:
    engine.save(place, 1.0)
    content = (place.path / "manifest-00000001.json").read_bytes()
    (place.path / "manifest-00000002.json").write_bytes(content[:-1])
    prune(place, 1)
    assert "nothing is removed there" in caplog.text
    assert engine.value_in(place) == 1.0


def test_a_checkpoint_without_the_right_to_write_there_is_read(place: Disk) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes anywhere")
    engine.save(place, 1.0)
    home = place.path / read_manifest(place).save_id
    home.chmod(0o555)
    try:
        assert engine.value_in(place) == 1.0
    finally:
        home.chmod(0o755)


# -- a converter's writer ---------------------------------------------------------------------------------

TENSORS = {("unit", "a"): torch.arange(6.0).view(2, 3), ("unit", "b"): torch.ones(3, dtype=torch.bfloat16)}


def written(place: Disk, read) -> None:
    outlines: Mapping[Key, Outline] = {
        key: Outline("like_param", tuple(tensor.shape), str(tensor.dtype)[6:])
        for key, tensor in TENSORS.items()
    }
    about = {**engine.members(), "iteration": 4}
    write_checkpoint(place, about, {"value": {1: 2.0}}, [{"own": 1}], outlines, read)


def test_a_checkpoint_is_written_from_tensors_that_come_one_by_one(place: Disk) -> None:
    asked = []
    written(place, lambda key: asked.append(key) or TENSORS[key])
    tensors, value = engine.load(place)
    assert value == {1: 2.0}
    assert sorted(asked) == sorted(TENSORS)
    assert {key: torch.equal(tensors[key], tensor) for (_, key), tensor in TENSORS.items()} == {
        "a": True,
        "b": True,
    }


def test_a_tensor_that_does_not_come_leaves_the_checkpoint_before(place: Disk) -> None:
    engine.save(place, 1.0)
    with pytest.raises(CheckpointError, match="rank 0: KeyError"):
        written(place, {}.__getitem__)
    assert engine.value_in(place) == 1.0
    assert len([*place.path.iterdir()]) == 2


def test_a_save_that_has_committed_stays_though_a_newer_one_exists(place: Disk, monkeypatch) -> None:
    engine.save(place, 1.0)
    create = Disk.create

    def and_a_newer_one(self: Disk, name: str, content: bytes) -> None:
        create(self, name, content)
        if name == "manifest-00000002.json":
            monkeypatch.setattr(Disk, "create", create)
            engine.save(place, 3.0)

    monkeypatch.setattr(Disk, "create", and_a_newer_one)
    engine.save(place, 2.0)
    assert engine.value_in(place) == 3.0


def test_a_save_under_a_limit_reads_no_manifest_that_it_has_read_before(tmp_path: Path, monkeypatch) -> None:
    folder = Disk(tmp_path / "checkpoints")
    for _ in range(5):
        engine.Engine().save(None, {}, series=Series(lambda: Numbering(folder, "other")))
    saver = engine.Engine()
    series = Series(lambda: Numbering(folder, "mine", limit=2))
    saver.save(None, {}, series=series)
    reads = []
    monkeypatch.setattr(
        Disk,
        "read",
        lambda self, name, *rest, plain=Disk.read: reads.append(name) or plain(self, name, *rest),
    )
    saver.save(None, {}, series=series)
    assert sum(name.startswith("manifest") for name in reads) <= 2


def test_a_listing_that_never_finds_what_it_lists_ends(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk, "LIST_SECONDS", 0.05)
    monkeypatch.setattr(disk, "_size", lambda entry: (tmp_path / "gone").stat())
    (tmp_path / "stale").touch()
    with pytest.raises(FileNotFoundError):
        Disk(tmp_path).list()
