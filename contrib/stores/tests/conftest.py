"""One S3 server for all tests, with an empty bucket for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_server import S3Server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    made = S3Server()
    yield made
    made.close()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    import s3fs

    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    server.reset()
    return server
