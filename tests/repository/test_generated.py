"""Files that tools write are as the tools write them, and miss nothing."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import pytest
from checkout import ROOT, refuse, text, tool

import accel_core
from accel_core import CAPABILITIES, Accelerator
from accel_core.config.sections import Sections
from accel_core.contract import hooks
from accel_core.contract.options import options_of
from accel_core.plugins.discovery import discover

CHECKED = ("metadata", "catalog", "reference", "gpu_figures")
"""Programs of tools/ that compare with `--check`."""


def differences(page: str, found: list[Any], wanted: list[Any]) -> list[str]:
    """What a page lacks, and what it has too often."""
    lacks, extra = Counter(wanted) - Counter(found), Counter(found) - Counter(wanted)
    return [f"{page} lacks {it}" for it in lacks] + [f"{page} should not have {it}" for it in extra]


def test_what_a_tool_writes_is_as_it_would_write_it(run_command) -> None:
    pytest.importorskip("tomllib", reason="the tools read TOML with the standard library")
    ended = {
        name: run_command(
            [sys.executable, ROOT / "tools" / f"{name}.py", "--check"],
            capture_output=True,
            text=True,
            check=False,
        )
        for name in CHECKED
    }
    refuse(
        (f"tools/{name}.py: {it.stdout}{it.stderr}" for name, it in ended.items() if it.returncode),
        "a file is stale: run the tool, without --check",
    )


def test_the_page_of_times_has_each_environment_of_tox() -> None:
    times = tool("tox_times")
    page = times.PAGE.read_text("utf-8")

    is_fresh = times.render(times.written(page)) in page
    refuse(["docs/test-times.md"] * (not is_fresh), "a table that is stale: run python tools/tox_times.py")


def test_the_table_of_the_kits_results_is_as_the_tool_writes_it() -> None:
    results = tool("kit_results")
    page = results.PAGE.read_text("utf-8")

    is_fresh = results.render(results.written(page)) in page
    refuse(
        ["docs/tested.md"] * (not is_fresh), "a table that is stale: run python tools/kit_results.py FOLDER"
    )


def test_the_tables_of_stacks_are_as_the_tool_writes_them() -> None:
    matrix = tool("stack_matrix")
    page = matrix.PAGE.read_text("utf-8")
    cells = matrix.read(page)

    stale = [title for title in matrix.TABLES if matrix.render(title, cells) not in page]
    refuse(stale, "a table that is stale: run python tools/stack_matrix.py FOLDER")
    assert {*cells.values()} <= {*matrix.RANKS}


def test_no_result_of_the_kit_is_red_or_missing() -> None:
    results = tool("kit_results")
    rows = results.TABLE.search(results.PAGE.read_text("utf-8"))[1].splitlines()
    refuse(
        (
            f"docs/tested.md: {row}"
            for row in rows
            for cell in row.strip("|").split("|")[2:]
            if not re.fullmatch(r"(real|simulated)(, .+)?|not run: .+", cell.strip())
        ),
        "a stack with a level that failed, or without a result: mend it, or say why in tools/kit_results.py",
    )


def test_hooks_md_has_every_hook_with_its_kind_once() -> None:
    specs = {name: hook.accel_spec for name, hook in vars(hooks).items() if hasattr(hook, "accel_spec")}
    found = re.findall(r"^#### (\w+)\n\n\*(\w+)", text(ROOT / "docs" / "hooks.md"), re.MULTILINE)
    refuse(
        differences("docs/hooks.md", found, [(name, spec.kind) for name, spec in specs.items()]),
        "the page is not as the contract: mend tools/reference.py",
    )


def test_hooks_md_lists_the_phases_and_each_capability_word_with_its_promise() -> None:
    page = text(ROOT / "docs" / "hooks.md")

    assert re.findall(r"^- `(\w+)`$", page, re.MULTILINE) == list(hooks.PHASES)
    assert dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", page, re.MULTILINE)) == dict(CAPABILITIES)


def test_reference_md_has_every_exported_name_and_every_member_of_the_accelerator_once() -> None:
    titles = re.findall(r"^### ([\w.]+)$", text(ROOT / "docs" / "reference.md"), re.MULTILINE)
    members = [f"accelerator.{name}" for name in dir(Accelerator) if not name.startswith("_")]
    refuse(
        differences("docs/reference.md", titles, [*members, *accel_core.__all__]),
        "the page is not as the package: mend tools/reference.py",
    )


def test_reference_md_has_every_option_of_what_is_installed_from_here() -> None:
    table = r"^### (\w+) \(accel-[\w-]+\)\n(.*?)(?=^##|\Z)"
    found = re.findall(table, text(ROOT / "docs" / "reference.md"), re.MULTILINE | re.DOTALL)
    tables = {name: set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)) for name, body in found}
    refuse(
        (
            f"{section}.{option}"
            for section, cls in Sections(discover()).all()
            for option in set(options_of(cls)) - {"plugins"}
            if option not in set().union(*(tables.get(it.__name__, set()) for it in cls.__mro__))
        ),
        "an option that docs/reference.md lacks: run python tools/reference.py",
    )
