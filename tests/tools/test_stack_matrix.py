"""The tool that writes which stacks train reads reports, and says which cell disagrees."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import checkout
import pytest

DRAWN = {"device": "npu", "strategy": "ddp", "precision": "bf16", "sizes": ["cp"], "extensions": ["ema"]}


@pytest.fixture
def tool() -> ModuleType:
    return checkout.tool("stack_matrix")


def pair(*parts: str) -> frozenset[str]:
    return frozenset(parts)


def of_kit(outcome: str = "passed", world: int = 2, **settings: str) -> dict[str, Any]:
    plugins = {"strategy": "fsdp", "extension": "tensor-parallel"}
    checks = ("test_losses_equal_the_plain_loop[1]", "test_mixed_precision[bf16]")
    return {
        "stack": [{"slot": slot, "plugin": name} for slot, name in plugins.items()],
        "settings": {path.replace("__", "."): value for path, value in settings.items()},
        "worlds": [world],
        "checks": [{"level": 2, "name": name, "outcome": outcome} for name in checks],
    }


def written(folder: Path, report: dict[str, Any], row: str = "") -> list[Path]:
    file = folder / row / "tmp" / "kit" / "report.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(report))
    return [file]


def test_a_stack_of_the_kit_has_its_version_its_sizes_and_the_precisions_that_it_trained_in(tool) -> None:
    found = tool.parts_of_kit(of_kit(fsdp__fsdp_version="1", parallelism__tp="2", parallelism__pp="1"))

    assert found == {"fsdp 1", "tp", "cpu", "fp32", "bf16"}


def test_in_one_process_no_size_is_tried(tool) -> None:
    assert tool.parts_of_kit(of_kit(world=1, parallelism__pp="-1")) == {"fsdp 2", "cpu", "fp32", "bf16"}


def test_a_stack_that_failed_does_not_train(tool) -> None:
    assert tool.parts_of_kit(of_kit("failed")) == set()


@pytest.mark.parametrize(("row", "tier"), [("fsdp", "default"), ("deepspeed-full", "full"), ("", "full")])
def test_the_row_of_tox_is_the_tier(tool, tmp_path: Path, row: str, tier: str) -> None:
    cells = tool.cells_of(written(tmp_path, of_kit(), row))

    assert cells[pair("fsdp 2", "tp")] == tier


def test_a_drawn_stack_counts_for_each_two_of_its_parts(tool, tmp_path: Path) -> None:
    cells = tool.cells_of(written(tmp_path, {"drawn": DRAWN, "refused": None}))

    assert cells[pair("ddp", "cp")] == cells[pair("bf16", "cp")] == cells[pair("ddp", "npu")] == "drawn"


def test_a_refusal_counts_for_the_two_parts_that_do_not_go_together(tool, tmp_path: Path) -> None:
    cells = tool.cells_of(written(tmp_path, {"drawn": DRAWN, "refused": ["ddp", "tp"]}))

    assert cells == {pair("ddp", "tp"): "refused"}


def test_a_page_keeps_what_no_report_says(tool) -> None:
    cells = {pair("ddp", "cp"): "default", pair("ddp", "tp"): "drawn", pair("ddp", "ema"): "drawn"}
    fresh = {pair("ddp", "cp"): "drawn", pair("ddp", "tp"): "refused", pair("ddp", "pp"): "full"}

    assert tool.merged(cells, fresh) == {
        pair("ddp", "cp"): "default",
        pair("ddp", "tp"): "refused",
        pair("ddp", "ema"): "drawn",
        pair("ddp", "pp"): "full",
    }


@pytest.mark.parametrize(
    ("told", "ran", "is_stale"),
    [
        ("refused", "drawn", True),
        ("drawn", "refused", True),
        ("full", "default", True),
        ("never", "drawn", False),
        ("default", "drawn", False),
        ("drawn", "drawn", False),
    ],
)
def test_a_page_that_says_otherwise_is_stale(tool, told: str, ran: str, is_stale: bool) -> None:
    cells, fresh = {pair("ddp", "cp"): told}, {pair("ddp", "cp"): ran}

    assert bool(tool.stale(cells, fresh)) is is_stale


def test_a_table_is_read_as_it_was_written(tool) -> None:
    text = "\n".join(tool.render(title, {pair("ddp", "cp"): "drawn"}) for title in tool.TABLES)

    cells = tool.read(text)

    assert cells[pair("ddp", "cp")] == "drawn"
    assert cells[pair("ddp", "tp")] == "never"
