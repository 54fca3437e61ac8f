"""The tool that measures the tests judges a copy of the sources, and not the checkout."""

from __future__ import annotations

import shutil
import sys

import pytest
from checkout import ROOT, tool

TRIAL = """
import subprocess, sys

def test_it():
    code = "from accel_core import AccelError; assert AccelError()"  # as workers are started
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
"""


@pytest.fixture
def mutation(run_command):
    """The tool; it starts processes itself."""
    return tool("mutation")


def test_a_fault_in_a_copy_is_seen_and_tests_of_another_copy_are_no_answer(mutation, tmp_path):
    shutil.copytree(ROOT / "accel_core", tmp_path / "accel_core")
    trial = tmp_path / "test_trial.py"
    trial.write_text(TRIAL)
    command = [sys.executable, "-c", mutation.PROGRAM, str(tmp_path), "accel_core", "-q", str(trial)]
    variables = {"PYTHONPATH": str(tmp_path)}

    assert mutation.run(command, variables, 250, tmp_path)[1] == 0
    (tmp_path / "accel_core/errors.py").write_text("AccelError = dict\n")
    output, code = mutation.run(command, variables, 250, tmp_path)
    assert code == 1
    assert "FAILED" in output
    (tmp_path / "empty").mkdir()
    assert mutation.run(command, {"PYTHONPATH": ""}, 250, tmp_path / "empty")[1] == mutation.ELSEWHERE


@pytest.mark.needs("coverage")
def test_the_lines_that_a_test_runs_are_of_the_checkout_wherever_packages_are_installed(
    mutation, tmp_path, monkeypatch
):
    shutil.copytree(ROOT / "accel_core", tmp_path / "site/accel_core")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    trial = tmp_path / "test_trial.py"
    trial.write_text("def test_it():\n    from accel_core import AccelError\n    AccelError()\n")

    assert "accel_core/errors.py" in mutation.measured(str(trial), 100)["lines"]


def test_a_program_that_runs_out_of_time_is_neither_passed_nor_failed(mutation):
    assert mutation.run([sys.executable, "-c", "import time; time.sleep(600)"], {}, 1)[1] is None


def test_a_line_has_its_tests_the_quickest_first_and_those_of_a_file_that_imports_it(mutation):
    found = mutation.Reach({"a::slow": 2.0, "a::quick": 1.0, "b::other": 0.5})
    found.lines["module"][1] = {"a::slow", "b::other", "b::fails"}
    found.lines["module"][2] = {"a"}

    assert found.of("module", [1]) == ["b::other", "a::slow"]
    assert found.of("module", [2]) == ["a::quick", "a::slow"]
    assert found.of("module", [3]) == []
    assert found.of("module", [2, 1]) == ["b::other", "a::quick", "a::slow"]


def test_a_fault_in_the_head_of_a_function_shows_in_its_body(mutation):
    source = "@cache\ndef f(\n    a=1,\n):\n    b = a\n    return b\n"
    shown = [list(mutation.lines_that_show(source, line)) for line in range(1, 7)]
    assert shown == [[5, 6], [5, 6], [5, 6], [5, 6], [5], [6]]


@pytest.mark.needs("cosmic-ray")
def test_each_fault_counts_but_those_of_a_message_and_of_strict(mutation, tmp_path, monkeypatch):
    source = tmp_path / "source.py"
    source.write_text(
        "def f(a, b):\n"
        "    if a > 7:\n"
        "        raise ValueError(f'{a + 1} is'\n"
        "                         f' too {b - 2}')\n"
        "    pairs = zip(a, b, strict=True)\n"
        "    zip(a, b, strict=False)\n"
        "    return sorted(pairs, reverse=True), f'{a + 1}'\n"
    )
    monkeypatch.setattr(mutation, "ROOT", tmp_path)

    mutants = [mutant for place in mutation.places_of(source) for mutant in place]

    assert {mutant.line for mutant in mutants} == {2, 6, 7}
    changed = [mutation.mutated(mutant).splitlines()[mutant.line - 1] for mutant in mutants]
    assert len(set(changed) & set(source.read_text().splitlines())) == 0
    assert "    zip(a, b, strict=True)" in changed
