"""`accel` itself: its commands, those that plugins add, its errors, and how fast it starts."""

from __future__ import annotations

import os
import re
import sys

import pytest
from generated_backends import generate_backends

from accel_testing.commands import clean_environment

HELLO = "import click\n\n@click.command()\ndef hello():\n    print('hello from a plugin')\n"


def test_help_lists_the_built_in_commands(accel):
    shown = accel("--help").stdout

    for command in ("launch", "config", "plugins", "env"):
        assert f"\n  {command}" in shown


def test_a_plugins_command_is_listed_by_its_summary_and_not_imported(toys, accel):
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


def test_a_plugins_command_runs(toys, accel):
    environment = toys(
        "hello", "command", implementation="'toy_command:hello'", modules={"toy_command": HELLO}
    )

    assert accel("hello", environment=environment).stdout == "hello from a plugin\n"


def test_a_plugins_command_that_cannot_be_imported_names_the_distribution(toys, accel):
    environment = toys("hello", "command", implementation="'toy_command:hello'", modules={"toy_command": ""})

    ended = accel("hello", environment=environment)

    assert ended.returncode == 1
    assert ended.stderr.startswith("accel: command plugin 'hello' (accel-hello 1.0) cannot be imported")
    assert "Traceback" not in ended.stderr


def test_a_command_whose_package_is_not_installed_names_the_package(accel):
    ended = accel("checkpoint", "list", environment={"ACCEL_PLUGINS_BLOCK": "checkpoint"})

    assert ended.returncode == 1
    assert ended.stderr.startswith("accel: the command 'checkpoint' comes with accel-checkpoint-tools\n")
    assert "pip install" in ended.stderr


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["launch", "--help"]], ids=" ".join)
def test_what_only_talks_imports_no_torch(words, run_command):
    code = "import sys; from accel_core.cli import main; sys.argv = ['accel', *sys.argv[1:]]\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"

    ended = run_command([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("words", [["--help"], ["plugins"], ["launch", "--help"]], ids=" ".join)
def test_what_only_talks_imports_of_installed_backends_the_cards_alone(tmp_path, words, run_command):
    names = generate_backends(tmp_path, count=2)
    code = "import atexit, sys; from accel_core.cli import main; sys.argv = ['accel', *sys.argv[1:]]\n"
    code += "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"

    ended = run_command(
        [sys.executable, "-c", code, *words],
        env=clean_environment({"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}),
        capture_output=True,
        text=True,
        check=True,
    )

    for name in names:
        package = f"accel_{name.replace('-', '_')}"
        found = {module for module in ended.stderr.split() if module.startswith(package)}
        assert found <= {package, f"{package}.card"}
