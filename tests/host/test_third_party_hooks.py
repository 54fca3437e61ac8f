"""Packages of third parties: one declares a hook, another implements it by name, a third needs neither."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("uv")

CARD = """
from accel_core import Card, hooks, implements

class Plugin:
    def __init__(self, config, run):
        self.run, self.steps = run, 0
{methods}
CARD = Card(name="{name}", slot="extension", summary="A toy.", api_version="1.0",
            implementation="acme_{name}:Plugin"{more})
"""
DECLARES = """
    @implements(hooks.after_step)
    def after_step(self, unit, optimizer, applied):
        self.steps += 1
        print("readings:", self.run.hooks["gauge.reading"](self.steps))
"""
SPECS = """
from accel_core.contract.bound import merge
from accel_core.contract.spec import spec

@spec("everyone", merge)
def reading(step: int) -> dict[str, float]:
    \"\"\"Return readings by name.\"\"\"
"""
IMPLEMENTS = """
    @implements("gauge.reading")
    def read(self, step):
        return {"pressure": 2.0 * step}
"""
COUNTS = """
    @implements(hooks.describe)
    def describe(self, unit):
        return ["counted"]
"""
TRAIN = """
import torch
from accel_core import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("counted" in accelerator.explain())
accelerator.end_training()
"""


def write_wheel(folder: Path, name: str, methods: str, more: str = "", **modules: str) -> Path:
    """A wheel of the plugin `name` and more modules."""
    info, wheel = f"acme_{name}-1.0.dist-info", folder / f"acme_{name}-1.0-py3-none-any.whl"
    files = {
        f"acme_{name}.py": CARD.format(name=name, methods=methods, more=more),
        **{f"{module}.py": source for module, source in modules.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[accel_core.extension]\n{name} = acme_{name}:CARD\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(file, text)
    return wheel


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, run_command):
    """`train(*names)`: what a run with these extensions prints, each installed from its wheel."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels = {
        "gauge": write_wheel(
            folder, "gauge", DECLARES, ', hookspecs="acme_gauge_hooks"', acme_gauge_hooks=SPECS
        ),
        "sensor": write_wheel(folder, "sensor", IMPLEMENTS),
        "counter": write_wheel(folder, "counter", COUNTS),
    }

    def run(*names: str) -> list[str]:
        site = folder / "-".join(names)
        words = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--no-deps",
            "--offline",
            "--target",
            str(site),
        ]
        run_command(
            [*words, *(str(wheels[name]) for name in names)],
            check=True,
            capture_output=True,
        )
        (site / "train.py").write_text(TRAIN)
        ended = run_command(
            [sys.executable, "train.py"],
            cwd=site,
            env={**os.environ, "ACCEL__EXTENSIONS": ",".join(names)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    return run


def test_a_package_calls_its_own_hook_that_another_package_implements(train) -> None:
    assert train("gauge", "sensor") == ["readings: {'pressure': 2.0}", "readings: {'pressure': 4.0}", "False"]


def test_a_hook_that_nobody_implements_has_an_empty_answer(train) -> None:
    assert train("gauge", "counter") == ["readings: {}", "readings: {}", "True"]


def test_an_implementation_needs_no_package_that_declares_its_hook(train) -> None:
    assert train("sensor", "counter") == ["True"]
