"""A host on which four vendors' libraries are broken, each in its way: it lists, explains, and trains on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from toy_distributions import card_source, write_distribution

FAULTS = {
    "so": ("import ctypes\nctypes.CDLL('libacme_runtime.so.1')", "libacme_runtime.so.1: cannot open shared"),
    "old": ("raise ImportError('built for torch 1.0, not for this one')", "ImportError: built for torch 1.0"),
    "quits": ("import sys\nsys.exit('no licence server')", "SystemExit: no licence server"),
    "half": (None, "No module named 'torch_half.runtime'"),
}
"""Plugin -> its vendor's library, and what is said of it. `half`: uninstalled, but for some folders."""
AILING = {
    "hangs": ("import time\ntime.sleep(30)", "it did not finish within 5 s"),
    "leaves": ("import os\nos._exit(0)", "it ended the process"),
}
"""Libraries that only a child process survives."""
IMPORT = "import torch_{0}.runtime"
TRAIN = """
import torch
from accel_core import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).square().mean())
optimizer.step()
print("trained on", accelerator.device, "of", accelerator.run.stack.device.name)
"""


@pytest.fixture
def host(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """`host(where)`: the environment of a machine whose plugins import their vendor in `where`."""

    def install(where: str) -> dict[str, str]:
        for name, (library, _) in (FAULTS if where != "implementation" else {**FAULTS, **AILING}).items():
            needs = IMPORT.format(name)
            plugin = f"class Plugin:\n    def __init__(self, config, run): ...\ndef probe():\n    {needs}\n"
            given = {"implementation": f"'toy_{name}_device:Plugin'", "verify": f"'toy_{name}_device:probe'"}
            given |= {"priority": "100"} if where != "implementation" else {}
            card = card_source(name, "device", **given)
            if where == "probe":
                card = f"def probe():\n    {needs}\n" + card.replace(
                    "api_version", "probe=probe, api_version"
                )
            modules = {
                f"toy_{name}": f"{needs}\n{card}" if where == "card" else card,
                f"toy_{name}_device": f"{needs}\n{plugin}" if where == "implementation" else plugin,
                f"torch_{name}": "",
                f"torch_{name}.runtime": library or "",
            }
            entry_points = {"accel_core.device": {name: f"toy_{name}:CARD"}}
            write_distribution(tmp_path / "site", f"accel-{name}", entry_points=entry_points, modules=modules)
        for file in (tmp_path / "site" / "torch_half").iterdir():
            file.unlink()
        return {"PYTHONPATH": str(tmp_path / "site")}

    return install


@pytest.mark.parametrize(("where", "status"), [("card", "broken"), ("probe", "unavailable")])
@pytest.mark.by_default
def test_each_is_listed_with_what_is_wrong(
    host: Callable[[str], dict[str, str]], where: str, status: str, accel
) -> None:
    ended = accel("plugins", "--all", environment=host(where))

    rows = {line.split()[0]: line for line in ended.stdout.splitlines()}
    assert ended.returncode == 0
    for name, (_, said) in FAULTS.items():
        assert f" {status} " in rows[name]
        assert said in rows[name]
    assert " available " in rows["native"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name == "hangs" else []) for name in (*FAULTS, *AILING)],
)
def test_the_doctor_says_where_the_import_ends(
    host: Callable[[str], dict[str, str]], name: str, accel
) -> None:
    patience = ("--timeout", "5") if name == "hangs" else ()
    ended = accel("plugins", "doctor", name, *patience, environment=host("implementation"))

    said = {**FAULTS, **AILING}[name][1]
    assert ended.returncode == 1
    assert f"implementation: toy_{name}_device:Plugin ..." in ended.stdout
    assert said.removeprefix("SystemExit: ") in ended.stdout


# A card that breaks is listed above, and passed over as one whose probe breaks is.
@pytest.mark.parametrize(
    "where", ["implementation", *(pytest.param(where, marks=pytest.mark.full) for where in ("card", "probe"))]
)
def test_auto_trains_on_what_works(
    host: Callable[[str], dict[str, str]], tmp_path: Path, where: str, accel
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)

    ended = accel("launch", "-n", "1", "train.py", environment=host(where), cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert "trained on cpu of native" in ended.stdout


@pytest.mark.full
@pytest.mark.parametrize("name", ["so", "quits"])
def test_who_names_one_is_told_why_it_cannot_be(
    host: Callable[[str], dict[str, str]], tmp_path: Path, name: str, accel
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)

    ended = accel(
        *("launch", "--device", name, "-n", "1", "train.py"), environment=host("implementation"), cwd=tmp_path
    )

    assert ended.returncode == 1
    assert f"device plugin '{name}' (accel-{name} 1.0) cannot be imported" in ended.stderr
    assert FAULTS[name][1] in ended.stderr
    assert f"accel plugins doctor {name}" in ended.stderr
