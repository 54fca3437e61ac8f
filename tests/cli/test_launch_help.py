"""`accel launch --help`, `--help-all`, and what a launch says before its workers start."""

from __future__ import annotations

import re

import pytest
from test_terminal import on_a_terminal

OPTIONS = {
    "modules": {
        "toy_options": "import attrs\nfrom accel_core import option\n"
        "@attrs.frozen(kw_only=True)\nclass Options:\n"
        "    mode: str = option('fast', choices=('fast', 'exact'), help='How it runs.')\n"
        "    size: int = option(2, help='How many.')\n"
    },
    "config": "'toy_options:Options'",
}


def test_help_shows_what_each_flag_takes(accel):
    shown = accel("launch", "--help").stdout

    for flag in (
        "--processes-per-node [INT|auto]",
        "--nodes INT",
        "--tee [none|main|all]",
        "--device-placement [true|false]",
        "--log-with NAME,...",
        "--config FILE",
    ):
        assert flag in shown
    assert not re.search(r"--[a-z-]+ VALUE", shown)


def test_help_all_has_the_options_of_plugins_that_can_run_here_and_then_the_others(toys, accel):
    toys("absent", "strategy", probe="lambda: 'no driver'", **OPTIONS)
    environment = toys("pony", "strategy", **OPTIONS)

    shown = accel("launch", "--help-all", environment=environment).stdout

    assert shown.startswith("Usage: accel launch")
    assert re.search(r"--data.split_batches \[true\|false\]", shown)
    assert re.search(r"--pony.mode \[fast\|exact\] +How it runs.", shown)
    assert re.search(r"--pony.size INT +How many.", shown)
    pony, others = shown.index("--pony.mode"), shown.index("Plugins that cannot run here:")
    assert pony < others < shown.index("no driver")
    assert "--absent.mode" not in shown


NAMED = {
    "strategy": "--strategy",
    "precision": "--mixed-precision",
    "tracker": "--log-with",
    "device": "--device",
}


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["launch", "dry-run"])
@pytest.mark.parametrize("slot", NAMED)
def test_a_missing_library_is_named_before_workers_start(toys, accel, tmp_path, slot, dry):
    pytest.importorskip("torch")
    flag = NAMED[slot]
    (tmp_path / "train.py").write_text("print('started')")
    environment = toys("pony", slot, probe="lambda: 'libpony is not installed'")

    ended = accel("launch", *dry, "-n", "1", flag, "pony", "train.py", environment=environment, cwd=tmp_path)

    assert ended.returncode == 1
    assert f"flag {flag}: {slot} pony cannot be used here: libpony is not installed" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "started" not in ended.stdout


def test_a_store_that_nobody_serves_is_named_before_workers_start(accel, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("print('started')")

    ended = accel(
        *("launch", "-n", "1", "--project.project_dir", "nowhere://bucket/run", "train.py"), cwd=tmp_path
    )

    assert ended.returncode == 1
    assert "project.project_dir: no plugin here reads and writes nowhere: URLs" in ended.stderr
    assert "started" not in ended.stdout


def test_while_torch_loads_a_terminal_says_so(tmp_path, start_command, accel):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text("print('started')")
    command = ("launch", "--device", "cpu", "-n", "1", "train.py")

    assert re.search(
        r"1 process, .*loading torch \.\.\.\n", on_a_terminal(start_command, *command, cwd=tmp_path)
    )
    assert "loading" not in accel(*command, cwd=tmp_path).stderr
