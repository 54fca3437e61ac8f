"""`accel` itself: its commands, those that plugins add, its errors, and how fast it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from command import ACCEL, accel, clean_environment
from generated import generate_backends

HELLO = "import click\n\n@click.command()\ndef hello():\n    print('hello from a plugin')\n"


def test_help_lists_the_built_in_commands():
    shown = accel("--help").stdout

    for command in ("launch", "config", "checkpoint", "plugins", "env"):
        assert f"\n  {command}" in shown


def test_a_plugins_command_is_listed_by_its_summary_and_not_imported(toys):
    environment = toys(
        "hello",
        "command",
        summary="'Says hello.'",
        implementation="'toy_hello_command:hello'",
        modules={"toy_hello_command": "raise RuntimeError('imported')"},
    )

    ended = accel("--help", environment=environment)

    assert re.search("^  hello +Says hello.$", ended.stdout, re.MULTILINE)
    assert ended.returncode == 0


def test_a_plugins_command_runs(toys):
    environment = toys(
        "hello", "command", implementation="'toy_command:hello'", modules={"toy_command": HELLO}
    )

    assert accel("hello", environment=environment).stdout == "hello from a plugin\n"


def test_a_plugins_command_that_cannot_be_imported_names_the_distribution(toys):
    environment = toys("hello", "command", implementation="'toy_command:hello'", modules={"toy_command": ""})

    ended = accel("hello", environment=environment)

    assert ended.returncode == 1
    assert ended.stderr.startswith("accel: command plugin 'hello' (accel-hello 1.0) cannot be imported")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["launch", "--help"]], ids=" ".join)
def test_what_only_talks_imports_no_torch(words):
    code = "import sys; from accel_core.cli import main; sys.argv = ['accel', *sys.argv[1:]]\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"

    ended = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs the CPU time of one child")
@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["launch", "--help"]], ids=" ".join)
def test_with_12_backends_of_25_options_it_answers_within_150_ms(tmp_path, words):
    generate_backends(tmp_path)
    # As an installer leaves it: modules are compiled. The first of the runs below does that.
    environment = clean_environment(
        {"PYTHONPATH": str(tmp_path), "PYTHONPYCACHEPREFIX": str(tmp_path / "pyc")}
    )
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def cpu_seconds() -> float:  # CPU time, because the machine of a test has other things to do
        child = subprocess.Popen([ACCEL, *words], env=environment, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = status
        assert status == 0
        return usage.ru_utime + usage.ru_stime

    figure = min(cpu_seconds() for _ in range(8))
    print(f"accel {' '.join(words)}: {1e3 * figure:.0f} ms (bar 150 ms)")
    assert figure <= 0.15
