"""Level 1: a store keeps and reads files, creates a file only once, and says which folders are in use."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from io import UnsupportedOperation

import pytest

from accel_core import Record, Storage, storage_at
from accel_testing.kit.checks import concerns

pytestmark = concerns("store")

LARGE = bytes(range(256)) * 36_000
"""Some 9 MB, which stores send in parts."""
AT_ONCE = 8


@pytest.fixture
def url(store: Record, request: pytest.FixtureRequest) -> str:
    """Return a new place: in --accel-store, else of the card's first scheme."""
    assert store.card is not None
    assert store.card.also, "the card names no scheme of URLs in `also`"
    given = request.config.getoption("accel_store") or f"{store.card.also[0]}://accel-kit"
    return f"{given}/{secrets.token_hex(8)}"


@pytest.fixture
def folder(url: str) -> Storage:
    """Return the folder of the new place."""
    return storage_at(url)


@pytest.fixture
def creates(folder: Storage) -> None:
    """Skip a store that says that it cannot create a file only once."""
    try:
        folder.create("it-can", b"1")
    except UnsupportedOperation as why:
        pytest.skip(f"the store takes no checkpoints: {why}")
    folder.remove(["it-can"])


def write(folder: Storage, name: str, content: bytes) -> None:
    """Write a file in three parts."""
    third = len(content) // 3
    with folder.writer(name) as file:
        for part in (content[:third], memoryview(content)[third : 2 * third], content[2 * third :]):
            file.write(part)


def read(folder: Storage, name: str, start: int, size: int) -> bytes:
    """Return bytes of a file."""
    content = bytearray(size)
    folder.read(name, start, memoryview(content))
    return bytes(content)


def test_a_folder_is_named_as_the_user_named_it(folder: Storage, url: str) -> None:
    assert (str(folder), folder.name) == (url, url.rpartition("/")[2])
    assert (str(folder.at("within")), folder.at("within").name) == (f"{url}/within", "within")


def test_nothing_lies_in_a_new_place(folder: Storage) -> None:
    assert dict(folder.list()) == {}


@pytest.mark.usefixtures("creates")
def test_a_second_create_is_refused(folder: Storage) -> None:
    folder.create("one", b"first")
    with pytest.raises(FileExistsError):
        folder.create("one", b"second, and longer")
    assert read(folder, "one", 0, 5) == b"first"
    assert dict(folder.list()) == {"one": 5}


@pytest.mark.usefixtures("creates")
def test_of_creates_at_once_one_is_done(folder: Storage) -> None:
    def create(number: int) -> bool:
        try:
            folder.create("one", str(number).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = list(pool.map(create, range(AT_ONCE)))
    assert done.count(True) == 1
    assert read(folder, "one", 0, 1) == str(done.index(True)).encode()


@pytest.mark.usefixtures("creates")
def test_a_folder_is_claimed_as_long_as_it_is_used(folder: Storage) -> None:
    within = folder.at("within")
    assert not within.is_claimed()
    with within.claim(), within.claim():
        write(within, "file", b"content")
        assert folder.at("within").is_claimed()
    assert not within.is_claimed()
    assert dict(within.list()) == {"file": 7}


def test_a_large_file_is_written_whole_and_read_in_parts(folder: Storage) -> None:
    within = folder.at("within")
    write(within, "large", LARGE)
    assert dict(folder.list()) == {"within": None}, "one level; a folder has no size"
    assert dict(within.list()) == {"large": len(LARGE)}
    assert read(within, "large", 0, len(LARGE)) == LARGE
    assert read(within, "large", 5_000_001, 300) == LARGE[5_000_001:][:300]
    with pytest.raises(EOFError):
        read(within, "large", len(LARGE) - 1, 2)


def test_what_is_read_near_is_the_same(folder: Storage) -> None:
    write(folder, "large", LARGE)
    near = folder.local_cache(secrets.token_hex(8))
    near.fetch("large", [(0, 100), (5_000_000, 1_000_000)])
    assert near.list()["large"] == len(LARGE)
    assert read(near, "large", 3_000_001, 4_000_000) == LARGE[3_000_001:][:4_000_000]


def test_what_is_removed_is_gone_and_may_be_gone_already(folder: Storage) -> None:
    for name in ("one", "two"):
        write(folder, name, b"content")
    folder.remove(["one"])
    assert dict(folder.list()) == {"two": 7}
    folder.remove(["one", "two"])
    assert dict(folder.list()) == {}


def test_a_file_that_is_not_there_is_said_so(folder: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        read(folder, "nothing", 0, 1)
