from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import card_source, write_distribution


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
