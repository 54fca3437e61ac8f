from __future__ import annotations

import pytest

from accel_core.config.resolve import load
from accel_core.plugins import Card, Discovery, Record


def record(name: str, slot: str = "strategy", config: str | None = None, **facts):
    card = Card(name=name, slot=slot, summary="A toy.", api_version="1.0", config=config)
    return Record(
        **{"name": name, "slot": slot, "distribution": f"toy-{name}", "version": "0.1", "card": card} | facts
    )


TOYS = Discovery(
    (
        record("shard", config="config_toys:ShardConfig"),
        record("plain"),
        record("rival-one", "extension", config="config_toys:RivalConfig"),
        record("unreadable", "extension", config="config_toys:Unreadable"),
        record("absent", config="no_such_module:Config"),
        record("torn", card=None, fault="broken", detail="ImportError: libtorn.so"),
        record("torchrun", "launcher"),
    )
)


@pytest.fixture
def toys():
    return TOYS


@pytest.fixture
def resolve(tmp_path):
    """Load with the toy plugins: `resolve("yaml text", ACCEL__X="1", flags={...}, python={...})`."""

    def call(yaml: str | None = None, *, flags=None, python=None, objects=(), **environment):
        if yaml is not None:
            (tmp_path / "accel.yaml").write_text(yaml, encoding="utf-8")
        return load(
            python=python,
            objects=objects,
            flags=flags,
            discovery=TOYS,
            environment=environment,
            directory=tmp_path,
        )

    return call
