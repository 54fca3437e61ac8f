"""The tool that writes the table of the kit's results reads reports, and says which row disagrees."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import checkout
import pytest


@pytest.fixture
def tool() -> ModuleType:
    return checkout.tool("kit_results")


def report(
    folder: Path,
    stack: str,
    outcomes: str = "passed",
    distribution: str = "accel-core",
    simulated: bool = True,
    complete: bool = True,
    **settings: str,
) -> None:
    plugins = dict(zip(("device", "strategy"), stack.split("+"), strict=False))
    facts = {
        "stack": [
            {"slot": slot, "plugin": name, "distribution": distribution} for slot, name in plugins.items()
        ],
        "settings": settings,
        "worlds": [1, 2],
        "simulated": simulated,
        "complete": complete,
        "checks": [{"level": level, "outcome": outcomes} for level in range(5)],
    }
    (folder / f"{stack}-{outcomes}.json").write_text(json.dumps(facts))


def test_a_row_says_what_its_report_does(tool: ModuleType, tmp_path: Path) -> None:
    report(tmp_path, "native+single")
    report(tmp_path, "native", "xfailed", simulated=False)

    rows = tool.reported(tmp_path.glob("*.json"))

    assert set(rows["native + single"].values()) == {"1, 2", "simulated"}
    assert set(rows["native"].values()) == {"1, 2", "real, 1 known to fail"}


def test_a_part_of_the_checks_is_not_a_result(tool: ModuleType, tmp_path: Path) -> None:
    report(tmp_path, "native+single", complete=False)

    assert tool.reported(tmp_path.glob("*.json")) == {}


def test_grids_of_one_stack_have_rows_of_their_own(tool: ModuleType, tmp_path: Path) -> None:
    sizes = {"parallelism.tp": "2", "parallelism.pp": "-1"}
    report(tmp_path, "native", version="1", **sizes, plan='{"0": "colwise"}')

    assert [*tool.reported(tmp_path.glob("*.json"))] == ["native, version 1, tp 2"]


def test_a_table_that_says_otherwise_is_stale(tool: ModuleType) -> None:
    said = {"a": {"device": "simulated"}}

    assert tool.stale(said, said) == []
    assert tool.stale({"a": {"device": "real"}}, said) == []  # it ran on the chip elsewhere
    assert tool.stale(said, {"a": {"device": "failed"}}) != []
    assert tool.stale(said, {"b": {"device": "real"}}) != []


def test_a_default_run_may_take_some_of_the_worlds(tool: ModuleType) -> None:
    said = {"a": {"at once": "1, 2"}}

    assert tool.stale(said, {"a": {"at once": "2"}}) == []
    assert tool.stale(said, {"a": {"at once": "4"}}) != []


def test_a_processor_that_can_more_fails_fewer_checks(tool: ModuleType) -> None:
    said = {"a": {"device": "real, 4 known to fail"}}

    assert tool.stale(said, {"a": {"device": "real, 2 known to fail"}}) == []
    assert tool.stale(said, {"a": {"device": "real"}}) == []
    assert tool.stale(said, {"a": {"device": "real, 5 known to fail"}}) != []


def test_a_level_that_did_not_run_needs_a_reason(tool: ModuleType) -> None:
    with pytest.raises(SystemExit, match="a, packaging: no result and no reason"):
        tool.render({"a": {"at once": "1", "device": "real"}})


def test_a_level_that_did_not_run_says_why(tool: ModuleType) -> None:
    table = tool.render({"xla": dict.fromkeys(("at once", *tool.LEVELS), "real") | {"processes": ""}})

    assert "| real | real | real | not run: XLA's CPU device serves one process | real |" in table


def test_a_reason_is_kept_until_there_is_a_result(tool: ModuleType) -> None:
    table = tool.render({"npu + fsdp": {"at once": "2", "training": "simulated", "processes": "simulated"}})

    read = tool.written(table)

    assert tool.render(read) == table
    assert read == {"npu + fsdp": {"at once": "2", "training": "simulated", "processes": "simulated"}}


def test_what_strangers_report_is_no_row(tool: ModuleType, tmp_path: Path) -> None:
    report(tmp_path, "acme", distribution="accel-acme")

    assert tool.reported(tmp_path.glob("*.json")) == {}


def test_the_check_says_which_result_is_stale(tmp_path: Path, run_command) -> None:
    report(tmp_path, "native", "failed")

    ended = run_command(
        [sys.executable, checkout.ROOT / "tools" / "kit_results.py", "--check", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 1
    assert "native, training: the table says " in ended.stdout
    assert "the kit 'failed'" in ended.stdout
