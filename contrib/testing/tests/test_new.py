"""`accel plugins new`: a whole distribution, by a name that is free."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from accel_testing.new import RENDERED, render
from accel_testing.simulated import write_distribution


@pytest.mark.parametrize("slot", RENDERED)
def test_it_writes_a_distribution_with_all_that_belongs_to_one(tmp_path: Path, slot: str, accel):
    ended = accel("plugins", "new", "my-own", "--slot", slot, cwd=tmp_path)

    made = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("**/*") if path.is_file()}
    assert made == set(ended.stdout.splitlines()[:-1])
    rest = {path.removeprefix("accel-my-own/") for path in made}
    assert {"pyproject.toml", "README.md", "LICENSE", ".github/workflows/ci.yml"} <= rest
    assert {
        f"src/accel_my_own/{name}" for name in ("__init__.py", "card.py", f"{slot}.py", "py.typed")
    } <= rest
    assert "tests/test_my_own_conformance.py" in rest


@pytest.mark.parametrize("slot", RENDERED)
def test_what_it_writes_is_code_that_fits_its_lines(slot: str):
    for path, text in render("my-own", slot).items():
        if path.endswith(".py"):
            compile(text, path, "exec")
            assert max(map(len, text.splitlines())) <= 110, path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Acme", "not lower-case words joined by single hyphens"),
        ("data", "a word of core's own config"),
        ("native", "provided by accel-core"),
        ("cuda", "provided by accel-cuda"),  # installed or not
        ("core", "accel-core is installed, and pip would replace it"),
        ("testing", "accel-testing is installed"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(tmp_path: Path, name: str, said: str, accel):
    ended = accel("plugins", "new", name, "--slot", "device", cwd=tmp_path)

    assert said in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_left_alone(tmp_path: Path, accel):
    (tmp_path / "accel-acme").mkdir()

    ended = accel("plugins", "new", "acme", "--slot", "device", cwd=tmp_path)

    assert "accel-acme is there already" in ended.stderr
    assert list((tmp_path / "accel-acme").iterdir()) == []


OPTIONS = {
    "device": ("--accel-simulate", "acmeccl"),
    "precision": ("--accel-reference", "acme_reference"),
}
"""What the kit is told of a template's plugin, besides its name."""
TRAINING = ("0,2", "packaging or losses_equal")
CHECKS = {
    **dict.fromkeys(("strategy", "precision", "extension"), TRAINING),
    "launcher": ("0,3", "packaging or workers_meet"),
}
"""Slot -> levels of the kit, and which of their checks; what is left out, the template's own tests run."""
MARKS = {
    **{slot: [pytest.mark.full] for slot in RENDERED},
    "device": [pytest.mark.full, pytest.mark.simulated],
    "strategy": [],
    "tracker": [],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("slot", [pytest.param(slot, marks=MARKS[slot]) for slot in RENDERED])
def test_what_it_writes_passes_the_kit(tmp_path: Path, slot: str, accel, conform):
    accel("plugins", "new", "acme", "--slot", slot, cwd=tmp_path)
    points = f"[accel_core.{slot}]\nacme = accel_acme.card:ACME\n"
    write_distribution(tmp_path, "accel-acme", points, version="0.1.0")
    project = tmp_path / "accel-acme"
    levels, some = CHECKS.get(slot, ("0,1", ""))
    folders = [project / "src", project / "tests/stand_in", project / "tests/reference"]

    chosen = ("--accel-level", levels, "-k", some, *OPTIONS.get(slot, ()))
    found = conform(tmp_path, "acme", *chosen, path=folders)

    assert not found.failed


@pytest.mark.full
@pytest.mark.needs("accel-ddp")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slot", RENDERED)
def test_what_it_writes_installs_and_passes_its_own_tests(tmp_path: Path, slot: str, accel, run_command):
    pytest.importorskip("uv")
    accel("plugins", "new", "acme", "--slot", slot, cwd=tmp_path)
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    uv = [sys.executable, "-m", "uv", "--quiet"]
    build = ("build", "--wheel", "--out-dir", str(tmp_path), str(tmp_path / "accel-acme"))
    run_command([*uv, *build], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    run_command([*uv, "pip", "install", "--no-deps", "--target", str(site), str(wheel)], check=True)

    tests = str(tmp_path / "accel-acme/tests")
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = run_command(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
