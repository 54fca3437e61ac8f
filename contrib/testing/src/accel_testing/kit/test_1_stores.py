"""Level 1: a store keeps and reads files, and creates a file only once."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from io import UnsupportedOperation
from pathlib import Path
from typing import Any

import pytest

from accel_core import Record, store_for
from accel_testing.kit.checks import concerns

pytestmark = concerns("store")

LARGE = bytes(range(256)) * 36_000
"""Some 9 MB, which stores send in parts."""
AT_ONCE = 8


@pytest.fixture
def hooks(store: Record) -> Any:
    """Return the hooks of the store under test."""
    assert store.card is not None
    assert store.card.also, "the card names no scheme of URLs in `also`"
    store_for.cache_clear()  # a store that was checked before in this process may have had the scheme
    return store_for(store.card.also[0])


@pytest.fixture
def folder(store: Record, request: pytest.FixtureRequest) -> str:
    """Return a new place: in --accel-store, else of the card's first scheme."""
    assert store.card is not None
    given = request.config.getoption("accel_store") or f"{store.card.also[0]}://accel-kit"
    return f"{given}/{secrets.token_hex(8)}"


@pytest.fixture
def creates(hooks: Any, folder: str) -> None:
    """Skip a store that says that it cannot create a file only once."""
    try:
        hooks.create_stored(f"{folder}/it-can", b"")
    except UnsupportedOperation as why:
        pytest.skip(f"the store takes no checkpoints: {why}")
    hooks.remove_stored([f"{folder}/it-can"])


def test_nothing_lies_in_a_new_place(hooks: Any, folder: str) -> None:
    assert dict(hooks.list_stored(folder)) == {}


@pytest.mark.usefixtures("creates")
def test_a_second_create_is_refused(hooks: Any, folder: str) -> None:
    hooks.create_stored(f"{folder}/one", b"first")
    with pytest.raises(FileExistsError):
        hooks.create_stored(f"{folder}/one", b"second, and longer")
    assert hooks.read_stored(f"{folder}/one", 0, 5) == b"first"
    assert dict(hooks.list_stored(folder)) == {"one": 5}


@pytest.mark.usefixtures("creates")
def test_of_creates_at_once_one_is_done(hooks: Any, folder: str) -> None:
    def create(number: int) -> bool:
        try:
            hooks.create_stored(f"{folder}/one", str(number).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = list(pool.map(create, range(AT_ONCE)))
    assert done.count(True) == 1
    assert hooks.read_stored(f"{folder}/one", 0, 1) == str(done.index(True)).encode()


def test_a_large_file_is_sent_whole_and_read_in_parts(hooks: Any, folder: str, tmp_path: Path) -> None:
    file, url = tmp_path / "large", f"{folder}/within/large"
    file.write_bytes(b"an older one")
    hooks.send_stored(file, url)
    file.write_bytes(LARGE)
    hooks.send_stored(file, url)
    assert hooks.read_stored(url, 0, len(LARGE)) == LARGE
    assert hooks.read_stored(url, 5_000_001, 300) == LARGE[5_000_001:][:300]
    assert dict(hooks.list_stored(folder)) == {"within": None}, "one level; a folder has no size"
    assert dict(hooks.list_stored(f"{folder}/within")) == {"large": len(LARGE)}


def test_what_is_removed_is_gone_and_may_be_gone_already(hooks: Any, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    for name in ("one", "two"):
        hooks.send_stored(file, f"{folder}/{name}")
    hooks.remove_stored([f"{folder}/one"])
    assert dict(hooks.list_stored(folder)) == {"two": 7}
    hooks.remove_stored([f"{folder}/one", f"{folder}/two"])
    assert dict(hooks.list_stored(folder)) == {}


def test_a_file_that_is_not_there_is_said_so(hooks: Any, folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        hooks.read_stored(f"{folder}/nothing", 0, 1)
