"""What runs on the repository's site, and what CONTRIBUTING names, is what tox runs here."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import yaml
from checkout import ROOT, refuse, text, tool

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))


def load(file: Path) -> dict[str, Any]:
    return yaml.safe_load(text(file))


def environments_of(job: dict[str, Any]) -> Iterator[str]:
    """The environments of tox that a job runs, those of its matrix included."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = [row["environment"] for row in matrix.get("include", ())]
    for step in job["steps"]:
        for name in re.findall(r"\btox run -e (.+)$", step.get("run", ""), re.MULTILINE):
            yield from [*matrix.get("environment", ()), *rows] if "matrix" in name else [name]


def test_each_environment_of_tox_has_its_job_once() -> None:
    """ci.yml runs those of plain `tox`, and other Pythons; nightly.yml runs all others."""
    environments = tool("tox_times").environments()
    offences = []
    for file, is_default in (("ci.yml", True), ("nightly.yml", False)):
        jobs = load(FOLDER / file)["jobs"].values()
        run = Counter(name for job in jobs for name in environments_of(job))
        runs = {name: default or name.startswith("py3") for name, (default, _) in environments.items()}
        wanted = Counter(name for name in environments if runs[name] == is_default)
        offences += [f".github/workflows/{file}: add {name}" for name in (wanted - run)]
        offences += [f".github/workflows/{file}: drop {name}" for name in (run - wanted)]
    refuse(offences, "a workflow that does not run what tox.ini lists")


def test_each_environment_is_one_that_tox_accepts_by_name() -> None:
    times = tool("tox_times")
    ini = text(ROOT / "tox.ini")
    settings = ConfigParser(interpolation=None)
    settings.read_string(ini)
    sections = [name for section in settings.sections() for name in times.expanded(section.partition(":")[2])]
    conditions = re.findall(r"^ *(?:\w+ = )?([\w,-]+): ", ini, re.MULTILINE)
    named = [*times.listed(settings["tox"]["env_list"]), *sections, *",".join(conditions).split(",")]
    factors = {factor for name in named for factor in name.split("-")}
    refuse(
        (f"tox.ini: {name}" for name in times.environments() if not factors.issuperset(name.split("-"))),
        "an environment whose name tox takes for a mistake: name it in a section, or before a colon",
    )


def test_core_runs_on_each_python_that_it_declares() -> None:
    matrix = load(FOLDER / "ci.yml")["jobs"]["core"]["strategy"]["matrix"]
    declared = re.findall(r"Python :: (3\.\d+)\"", text(ROOT / "pyproject.toml"))

    assert matrix["python"] == declared


def test_a_workflow_may_read_only_and_its_jobs_end() -> None:
    offences = []
    for file in FILES:
        workflow = load(file)
        limits = {name: job.get("timeout-minutes", 360) for name, job in workflow["jobs"].items()}
        if workflow.get("permissions") != {"contents": "read"}:
            offences.append(f"{file.relative_to(ROOT)}: give it `permissions: contents: read`")
        if True not in workflow:  # YAML 1.1 reads the key `on` as a boolean
            offences.append(f"{file.relative_to(ROOT)}: say when it runs: `on:`")
        offences += [
            f"{file.relative_to(ROOT)}: job {name} may take {minutes} minutes, of at most 180"
            for name, minutes in limits.items()
            if minutes > 180
        ]
    refuse(offences, "a workflow that may do too much, or take too long")


def test_only_jobs_that_publish_may_ask_for_a_token() -> None:
    asking = [
        (file.name, name)
        for file in FILES
        for name, job in load(file)["jobs"].items()
        if "id-token" in job.get("permissions", {})
    ]

    assert asking == [("pages.yml", "publish"), ("release.yml", "publish")]


def test_each_file_for_the_site_is_yaml() -> None:
    files = sorted(ROOT.glob(".github/**/*.yml"))
    refuse(
        (str(file.relative_to(ROOT)) for file in files if not isinstance(load(file), dict)),
        "a file that is not a table of YAML",
    )


def test_pre_commit_runs_the_linter_of_the_constraints() -> None:
    config = load(ROOT / ".pre-commit-config.yaml")
    (revision,) = (repo["rev"] for repo in config["repos"] if repo["repo"].endswith("/ruff-pre-commit"))

    assert f"\nruff=={revision.removeprefix('v')}\n" in text(ROOT / "constraints.txt")


def test_the_commands_that_contributing_names_exist() -> None:
    page = text(ROOT / "CONTRIBUTING.md")
    environments = tool("tox_times").environments()
    commands = [shlex.split(line) for line in re.findall(r"`((?:tox|pytest|python) [^`]+)`", page)]
    offences = [
        f"CONTRIBUTING.md: {shlex.join([program, *rest])}"
        for program, *rest in commands
        if (program == "tox" and rest[0] == "-e" and rest[1] not in environments)
        or (program != "tox" and rest[0][0] != "-" and not (ROOT / rest[0]).exists())
    ]

    assert len(commands) > 3
    refuse(offences, "a command that names no environment of tox.ini, or no file")
