"""A folder on a disk: files appear whole, under names that nothing had; claims say who is at work."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import engine
import pytest

from accel_core.storage import disk as module
from accel_core.storage.commit import prune
from accel_core.storage.disk import CLAIM, Disk
from accel_testing.patience import patience

HOUR = 3600.0
FILES = Path("/proc/self/fd")
"""Those that this process has open."""


def refuse(number: int):
    def refused(*given: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.fixture
def place(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "here")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- exclusive creation -----------------------------------------------------------------------------------


@pytest.fixture(params=["link", "O_EXCL"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The step of the ladder on which files are created here."""
    if request.param != "link":
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))  # FAT, and buckets that are mounted
    return str(request.param)


def test_a_name_is_given_once(step: str, place: Disk) -> None:
    place.path.mkdir()
    place.create("manifest", b"first")
    with pytest.raises(FileExistsError):
        place.create("manifest", b"second")
    assert (place.path / "manifest").read_bytes() == b"first"
    assert names(place.path) == ["manifest"]


def test_saves_replace_each_other(step: str, place: Disk) -> None:
    for value in (1.0, 2.0, 3.0):
        engine.save(place, value)
        assert engine.value_in(place) == value
    assert names(place.path)[0] == "manifest-00000003.json"
    assert len(names(place.path)) == 2


@pytest.mark.parametrize("step", ["link"])
def test_what_exists_by_our_own_request_is_a_success(
    step: str, place: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS sends a request again whose answer was lost."""
    link = os.link

    def answered_late(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(os, "link", answered_late)
    engine.save(place, 1.0)
    engine.save(place, 2.0)
    assert engine.value_in(place) == 2.0
    assert len(names(place.path)) == 2
    place.create("new", b"mine")
    with pytest.raises(FileExistsError):
        place.create("new", b"theirs")


def test_an_error_that_is_no_lack_of_the_operation_is_raised(
    place: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.path.mkdir()
    monkeypatch.setattr(os, "link", refuse(errno.EROFS))
    with pytest.raises(OSError, match="Read-only"):
        place.create("manifest", b"first")
    assert names(place.path) == []


# -- reading ----------------------------------------------------------------------------------------------


def test_a_read_follows_no_link_and_waits_for_no_pipe(place: Disk) -> None:
    place.path.mkdir()
    (place.path / "file").write_bytes(b"12345")
    (place.path / "link").symlink_to(place.path / "file")
    os.mkfifo(place.path / "pipe")
    found = bytearray(3)
    place.read("file", 1, memoryview(found))
    assert found == b"234"
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            place.read(name, 0, memoryview(found))
    with pytest.raises(EOFError, match="after 5 bytes"):
        place.read("file", 3, memoryview(found))
    assert dict(place.list()) == {"file": 5, "link": None, "pipe": None}


def test_a_folder_of_which_a_file_is_replaced_while_it_is_listed_is_listed_again(
    place: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint would have no manifest for that moment."""
    place.path.mkdir()
    old, new, size_of = place.path / "manifest-1", place.path / "manifest-2", module._size
    old.write_bytes(b"old")

    def replaced(entry: os.DirEntry[str]) -> int | None:
        if entry.name == old.name:
            new.write_bytes(b"newer")
            old.unlink()
        return size_of(entry)

    monkeypatch.setattr(module, "_size", replaced)
    assert dict(place.list()) == {"manifest-2": 5}


def test_many_files_are_read_with_few_open(place: Disk) -> None:
    place.path.mkdir()
    for number in range(200):
        (place.path / str(number)).write_bytes(b"%03d" % number)
    before, found, reader = len([*FILES.iterdir()]), bytearray(3), Disk(place.path)
    for number in [*range(200), 0, 199]:
        reader.read(str(number), 0, memoryview(found))
        assert int(found) == number
    assert len([*FILES.iterdir()]) <= before + module.OPEN_FILES
    del reader
    assert len([*FILES.iterdir()]) <= before


# -- claims -----------------------------------------------------------------------------------------------


def save_folder(place: Disk, digits: str = "0") -> Disk:
    """A folder of a save that nothing names."""
    home = place.at(f"save-{digits * 16}")
    home.path.mkdir(parents=True)
    (home.path / "state.json").write_text("{}")
    return home


def make_old(path: Path, seconds: float) -> None:
    past = time.time() - seconds
    os.utime(path, (past, past))


def test_a_save_under_way_in_this_process_is_not_pruned(place: Disk) -> None:
    engine.save(place, 1.0)
    home = save_folder(place)
    with home.claim():
        prune(place, 1)
        assert (home.path / "state.json").exists()
    prune(place, 1)
    assert not home.path.exists()
    assert engine.value_in(place) == 1.0


STANDS = "import sys; sys.path.insert(0, sys.argv[1]); import engine; engine.save_and_stop(sys.argv[2], 7.0)"


def test_a_live_writers_save_is_not_pruned_and_a_killed_ones_is(place: Disk, start_command) -> None:
    engine.save(place, 1.0)
    command = [sys.executable, "-c", STANDS, str(Path(__file__).parent), str(place.path)]
    with start_command(command) as writer:
        end = time.monotonic() + patience(60)
        while not (place.path.parent / "standing").exists():
            assert time.monotonic() < end
            assert writer.poll() is None
            time.sleep(0.01)
        engine.save(place, 2.0)
        assert len(names(place.path)) == 3, "its folder stays"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        engine.save(place, 3.0)
    assert len(names(place.path)) == 2
    assert engine.value_in(place) == 3.0


def test_a_save_under_way_in_this_process_is_not_pruned_where_locks_are_a_processs(
    place: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS has such locks: a process gets one that it has already, and loses it where it looks at the file."""
    engine.save(place, 1.0)
    home = save_folder(place)
    with home.claim():
        monkeypatch.setattr(fcntl, "flock", lambda file, how: None)
        prune(place, 1)
        assert (home.path / "state.json").exists()


def test_a_file_system_that_refuses_locks_fails_no_save(place: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    for value in (1.0, 2.0):
        engine.save(place, value)
        assert engine.value_in(place) == value
    assert len(names(place.path)) == 2


@pytest.mark.parametrize("where", ["no locks", "another machine", "locks that cannot be asked"])
def test_a_claim_without_a_lock_to_ask_is_judged_by_its_age(
    place: Disk, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save(place, 1.0)
    home = save_folder(place)
    boot = {"no locks": "-", "another machine": "a-boot-of-another-machine"}.get(where, module._boot())
    claim = home.path / f"{CLAIM}0123456789abcdef"
    claim.write_text(f"{boot} host\n")
    if where == "locks that cannot be asked":
        monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    make_old(claim, 23 * HOUR)
    prune(place, 1)
    assert home.is_claimed()
    assert (home.path / "state.json").exists()
    make_old(claim, 25 * HOUR)
    prune(place, 1)
    assert not home.path.exists()


def test_a_claim_of_this_machine_whose_lock_nobody_holds_is_dead_at_once(place: Disk) -> None:
    home = save_folder(place)
    (home.path / f"{CLAIM}0123456789abcdef").write_text(f"{module._boot()} host\n")
    assert not home.is_claimed()


def test_a_claim_that_is_being_made_has_some_seconds(place: Disk) -> None:
    home = save_folder(place)
    claim = home.path / f"{CLAIM}0123456789abcdef"
    claim.touch()
    assert home.is_claimed()
    make_old(claim, module.BEGIN_SECONDS + 1)
    assert not home.is_claimed()
    empty = place.at("save-1111111111111111")
    empty.path.mkdir()
    assert empty.is_claimed()
    make_old(empty.path, module.BEGIN_SECONDS + 1)
    assert not empty.is_claimed()


def test_a_claim_leaves_nothing_behind(place: Disk) -> None:
    home = place.at("save-2222222222222222")
    with home.claim():
        assert home.is_claimed()
    with pytest.raises(KeyError), home.claim():
        raise KeyError
    assert not home.path.exists()
    assert not module._held
