from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from toy_distributions import card_source, write_distribution

from accel_core.plugins.discovery import Record, discover

# A slow machine is no finding, and what one commit passes the next one must not fail by chance:
# `pytest --hypothesis-profile default` looks for more.
settings.register_profile(
    "sure", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sure")


@pytest.fixture(autouse=True)
def _core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the extension that joins each run where it is installed."""
    if find_spec("accel_monitor"):
        monkeypatch.setenv("ACCEL_PLUGINS_BLOCK", "monitor")


@pytest.fixture
def toy_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`toy_distribution(name, entry_points=..., modules=...)` installs one for the time of a test."""

    def install(name: str, *, folder: str = "site", **contents: Any) -> Path:
        site = tmp_path / folder
        info = write_distribution(site, name, **contents)
        monkeypatch.syspath_prepend(site)
        return info

    yield install
    for module, value in list(sys.modules.items()):
        if str(getattr(value, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[module]


@pytest.fixture
def toy_plugin(toy_distribution: Callable[..., Path]) -> Callable[..., Record]:
    """`toy_plugin(name, slot, source=...)` installs `accel-NAME` with one plugin and discovers it."""

    def install(name: str, slot: str = "strategy", *, source: str | None = None, **arguments: str) -> Record:
        module = f"toy_{name.replace('-', '_')}"
        toy_distribution(
            f"accel-{name}",
            entry_points={f"accel_core.{slot}": {name: f"{module}:CARD"}},
            modules={module: card_source(name, slot, **arguments) if source is None else source},
        )
        record = discover({}).get(name)
        assert record is not None
        return record

    return install


@pytest.fixture
def toys(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`toys(name, slot, modules={...}, **card)` installs a plugin; gives the environment that has it."""
    site = tmp_path / "site"

    def install(
        name: str, slot: str, *, source: str | None = None, modules: Any = None, **card: str
    ) -> dict[str, str]:
        module = f"toy_{name.replace('-', '_')}"
        write_distribution(
            site,
            f"accel-{name}",
            entry_points={f"accel_core.{slot}": {name: f"{module}:CARD"}},
            modules={module: source or card_source(name, slot, **card), **(modules or {})},
        )
        return {"PYTHONPATH": str(site)}

    return install
