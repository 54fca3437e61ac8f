from __future__ import annotations

from pathlib import Path

import pytest
from toy_distributions import write_distribution


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
