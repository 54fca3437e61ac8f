from __future__ import annotations

import pytest
from config_toys import TOYS

from accel_core.config.resolve import load


@pytest.fixture
def toys():
    return TOYS


@pytest.fixture
def resolve(tmp_path):
    """Load with the toy plugins: `resolve("yaml text", ACCEL__X="1", flags={...}, python={...})`."""

    def call(yaml: str | None = None, *, flags=None, python=None, objects=(), presets=None, **environment):
        if yaml is not None:
            (tmp_path / "accel.yaml").write_text(yaml, encoding="utf-8")
        return load(
            python=python,
            objects=objects,
            presets=presets,
            flags=(flags or {}).items(),
            discovery=TOYS,
            environment=environment,
            directory=tmp_path,
        )

    return call
