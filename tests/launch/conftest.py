from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / "cli")]
from toys import card_source, write_distribution  # noqa: E402


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


@pytest.fixture
def half_installed(tmp_path: Path) -> dict[str, str]:
    """The environment with a package that torch imports unasked, and that cannot be imported."""
    write_distribution(
        tmp_path / "site",
        "torch-pony",
        entry_points={"torch.backends": {"torch_pony": "torch_pony:load"}},
        modules={"torch_pony": "raise ImportError('libpony.so: cannot open shared object file')"},
    )
    return {"PYTHONPATH": str(tmp_path / "site")}
