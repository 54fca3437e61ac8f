"""The benchmarks run on core's insides, which change, and write what they measured."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
README = BENCHMARKS / "README.md"


def script(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def arena():
    return script("arena")


@pytest.mark.parametrize("name", ["rows", "growth"])
def test_a_table_is_written_between_its_marks_and_nowhere_else(arena, name):
    page = README.read_text(encoding="utf-8")
    written = arena.between(page, name, "| a table |")
    begin, end = f"<!-- {name}: benchmarks/run.py --write -->\n", f"<!-- /{name} -->\n"
    assert written.partition(begin)[2].partition(end)[0] == "\n| a table |\n\n"
    assert written.partition(begin)[0] == page.partition(begin)[0]
    assert written.partition(end)[2] == page.partition(end)[2]
    assert arena.between(written, name, page.partition(begin)[2].partition(end)[0]) == page


@pytest.mark.parametrize("page", ["", "<!-- /growth -->\n<!-- growth: benchmarks/run.py --write -->\n"])
def test_a_page_without_the_marks_is_refused(arena, page):
    with pytest.raises(ValueError, match="lacks the marks"):
        arena.between(page, "growth", "| a table |")


def test_what_time_does_not_suffice_for_is_left_out_by_name(arena):
    now = [0.0]

    def takes(seconds):
        now[0] += seconds
        return seconds

    lengths = {"a": 5, "b": 6, "c": 7, "d": 8}
    benchmarks = {name: lambda seconds=seconds: takes(seconds) for name, seconds in lengths.items()}
    assert arena.within(11, benchmarks, clock=lambda: now[0]) == ({"a": 5, "b": 6}, ["c", "d"])


def test_the_program_that_generates_backends_is_there(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    assert script("startup").GENERATE.is_file()


def test_growth_has_each_cost_at_three_sizes_and_stands_in_the_readme(monkeypatch):
    pytest.importorskip("torch")
    growth = script("growth")
    small = [line._replace(sizes=(16, 32, 64)) for line in growth.LINES]
    monkeypatch.setattr(growth, "LINES", small)
    monkeypatch.setattr(growth, "LEAVES", 20)
    for module, name in ((growth.logging, "disable"), (growth.gc, "collect")):  # of the whole process
        monkeypatch.setattr(module, name, lambda *level: None)
    found = growth.measure(count=0)
    assert [sizes for _, sizes, _ in found] == [[16, 32, 64]] * len(small)
    assert all(math.isfinite(cost) and cost >= 0 for _, _, costs in found for cost in costs)
    table = README.read_text(encoding="utf-8").partition("<!-- growth:")[2].partition("<!-- /growth")[0]
    told = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:]
    assert told == re.findall(r"^\| (.+?) \|", growth.table(found), re.MULTILINE)[1:]


def test_discovery_and_binding_are_measured(run_command):
    ended = run_command(
        [sys.executable, "run.py", "host", "--rounds", "1"],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n| discovery of") == 1
    assert "hooks of a run of 4 plugins" in ended.stdout
