"""Files lie where others look for them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from checkout import ROOT, refuse, text


def test_the_root_of_core_has_four_modules() -> None:
    found = {file.name for file in (ROOT / "accel_core").glob("*.py")}
    refuse(
        (f"accel_core/{name}" for name in found - {"__init__.py", "__main__.py", "_version.py", "errors.py"}),
        "a module outside the rooms: put it into one",
    )


def test_no_two_helpers_of_tests_are_called_alike() -> None:
    """Tests import them by their bare names, from every folder with tests (conftest.py of the root)."""
    folders = [folder for pattern in ("tests", "*/*/tests") for folder in ROOT.glob(pattern)]
    files = [file for folder in folders for file in folder.glob("**/*.py")]
    shared = {file.parent for file in files if file.name.startswith(("test_", "conftest"))}
    named: dict[str, list[Path]] = defaultdict(list)
    for file in (file for folder in shared for file in folder.glob("*.py")):
        if not file.name.startswith(("test_", "conftest")):
            named[file.name].append(file.relative_to(ROOT))
    refuse(
        (" and ".join(map(str, same)) for same in named.values() if len(same) > 1),
        "helpers of one name: rename all but one",
    )


def test_each_package_has_a_changelog_with_a_place_for_the_next_change() -> None:
    folders = [file.parent for file in (ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml"))]
    pages = [folder / "CHANGELOG.md" for folder in folders]
    refuse(
        (
            str(page.relative_to(ROOT))
            for page in pages
            if not page.exists() or text(page).count("\n## Unreleased\n") != 1
        ),
        "a changelog without a section `## Unreleased`, or with several",
    )
