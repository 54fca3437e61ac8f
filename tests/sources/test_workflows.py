"""What runs on the repository's site is what tox runs here."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


needs_tomllib = pytest.mark.skipif(sys.version_info < (3, 11), reason="the tools read TOML with tomllib")


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text("utf-8"))


def environments_of(job: dict[str, Any]) -> Iterator[str]:
    """The environments of tox that a job runs, those of its matrix included."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = [row["environment"] for row in matrix.get("include", ())]
    for step in job["steps"]:
        for name in re.findall(r"\btox run -e (.+)$", step.get("run", ""), re.MULTILINE):
            yield from [*matrix.get("environment", ()), *rows] if "matrix" in name else [name]


def environments_in(file: str) -> list[str]:
    return [name for job in load(FOLDER / file)["jobs"].values() for name in environments_of(job)]


def test_each_environment_of_tox_has_its_job_once() -> None:
    environments = tool("tox_times").environments()
    default = [name for name, (is_default, _) in environments.items() if is_default]

    assert sorted(environments_in("ci.yml")) == sorted(default)
    assert sorted(environments_in("nightly.yml")) == sorted(set(environments) - set(default))


def test_each_environment_is_one_that_tox_accepts_by_name() -> None:
    times = tool("tox_times")
    text = (ROOT / "tox.ini").read_text("utf-8")
    settings = ConfigParser(interpolation=None)
    settings.read_string(text)
    sections = [name for section in settings.sections() for name in times.expanded(section.partition(":")[2])]
    conditions = re.findall(r"^ *(?:\w+ = )?([\w,-]+): ", text, re.MULTILINE)
    named = [*times.listed(settings["tox"]["env_list"]), *sections, *",".join(conditions).split(",")]
    factors = {factor for name in named for factor in name.split("-")}

    unknown = [name for name in times.environments() if not factors.issuperset(name.split("-"))]

    assert not unknown, f"name them in a section, or before a colon in [testenv]: {unknown}"


def test_core_runs_on_each_python_that_it_declares() -> None:
    matrix = load(FOLDER / "ci.yml")["jobs"]["core"]["strategy"]["matrix"]
    declared = re.findall(r"Python :: (3\.\d+)\"", (ROOT / "pyproject.toml").read_text("utf-8"))

    assert matrix["python"] == declared


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_workflow_may_read_only_and_its_jobs_end(file: Path) -> None:
    workflow = load(file)

    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 180 for job in workflow["jobs"].values())
    assert True in workflow  # YAML 1.1 reads the key `on` as a boolean


def test_only_jobs_that_publish_may_ask_for_a_token() -> None:
    asking = [
        (file.name, name)
        for file in FILES
        for name, job in load(file)["jobs"].items()
        if "id-token" in job.get("permissions", {})
    ]

    assert asking == [("pages.yml", "publish"), ("release.yml", "publish")]


@pytest.mark.parametrize("file", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda file: file.name)
def test_each_file_for_the_site_is_yaml(file: Path) -> None:
    assert isinstance(load(file), dict)


def test_pre_commit_runs_the_linter_of_the_constraints() -> None:
    config = load(ROOT / ".pre-commit-config.yaml")
    (revision,) = (repo["rev"] for repo in config["repos"] if repo["repo"].endswith("/ruff-pre-commit"))

    assert f"\nruff=={revision.removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text("utf-8")


@needs_tomllib
def test_metadata_of_all_packages_is_fresh(run_command) -> None:
    command = [sys.executable, ROOT / "tools" / "metadata.py", "--check"]
    result = run_command(command, capture_output=True, text=True, check=False)

    assert (result.returncode, result.stdout) == (0, "")


@needs_tomllib
def test_each_package_has_a_changelog_with_a_place_for_the_next_change() -> None:
    folders = [ROOT, *tool("metadata").members()]
    texts = {folder: (folder / "CHANGELOG.md").read_text("utf-8") for folder in folders}

    assert [folder.name for folder, text in texts.items() if text.count("\n## Unreleased\n") != 1] == []


def test_a_release_with_another_version_is_refused() -> None:
    found = list(tool("release").problems("99.0"))

    assert any("accel_core/_version.py: the version is" in line for line in found)
    assert any("CHANGELOG.md: there is no section 99.0" in line for line in found)


def test_the_commands_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    environments = tool("tox_times").environments()
    commands = [shlex.split(line) for line in re.findall(r"`((?:tox|pytest|python) [^`]+)`", text)]

    for program, *rest in commands:
        if program == "tox" and rest[0] == "-e":
            assert rest[1] in environments, rest
        elif program in ("pytest", "python"):
            assert (ROOT / rest[0]).exists(), rest
    assert len(commands) > 3
