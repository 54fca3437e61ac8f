"""The probe by the installed torch."""

from __future__ import annotations

from importlib import metadata

import pytest

from accel_fsdp.card import probe


@pytest.mark.parametrize(
    ("version", "usable"),
    [
        ("2.8.0+cu128", False),
        ("2.10.1", False),
        ("2.10+cu128", False),
        ("2.11.0a0", True),
        ("2.11+cpu", True),
        ("2.12rc1", True),
        ("3.0", True),
        ("3+rocm7.1", True),
    ],
)
def test_an_older_torch_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str, usable: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)

    reason = probe()

    assert (reason is None) == usable
    assert reason is None or "pip install 'torch>=2.11'" in reason


def test_a_missing_torch_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)

    assert probe() == "torch is not installed; pip install 'torch>=2.11'"
