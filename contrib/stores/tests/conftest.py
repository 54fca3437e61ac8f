"""One S3 server for all tests, with an empty bucket for each; and a new hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer
from s3_server import S3Server

from accel_stores import bucket


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.close()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    import s3fs

    monkeypatch.setattr(bucket, "_proved", set())
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    server.reset()
    return server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    made = HubServer()
    monkeypatch.setattr(bucket, "_proved", set())
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    from huggingface_hub import HfFileSystem, close_session, constants

    template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", made.url)  # both are read when it is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    HfFileSystem.clear_instance_cache()
    yield made
    close_session()
    made.close()
