"""`accel plugins` and its doctor: what is installed, what is wrong with it, what would be chosen."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
from toy_distributions import card_source, write_distribution

PLUGIN = "class Plugin:\n    def __init__(self, config, run): ...\n"


def row(output: str, name: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(f"{name} "))


def test_an_available_plugin_is_a_row_with_distribution_and_summary(toys, accel):
    shown = accel("plugins", environment=toys("pony", "strategy")).stdout

    assert row(shown, "pony").split(maxsplit=5) == [
        "pony", "strategy", "available", "accel-pony", "1.0", "A toy.",
    ]  # fmt: skip


BROKEN = {
    "raises": ({"source": "raise OSError('no such library')"}, "broken", "OSError: no such library"),
    "exits": ({"source": "raise SystemExit(3)"}, "broken", "SystemExit: 3"),
    "unusable": ({"probe": "lambda: 'no driver'"}, "unavailable", "no driver"),
    "too-new": ({"api_version": "'9.0'"}, "incompatible", "upgrade accel-core"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_plugin_that_cannot_be_used_is_a_row_with_its_reason(toys, case, accel):
    arguments, status, reason = BROKEN[case]

    environment = toys("pony", "strategy", **arguments)
    ended = accel("plugins", "--all", environment=environment)

    assert ended.returncode == 0
    assert f" {status} " in row(ended.stdout, "pony")
    assert reason in row(ended.stdout, "pony")
    assert " available " in row(ended.stdout, "native")

    usable = accel("plugins", environment=environment).stdout
    assert "\npony " not in usable
    assert re.search(rf"\d+ {status}\b.*: `accel plugins --all` says why", usable)


def test_a_blocked_plugin_is_a_row(toys, accel):
    environment = {**toys("pony", "strategy"), "ACCEL_PLUGINS_BLOCK": "pony"}

    assert " blocked " in row(accel("plugins", "--all", environment=environment).stdout, "pony")


def test_json_holds_what_the_table_shows_and_the_capabilities(toys, accel):
    listed = json.loads(
        accel("plugins", "--json", environment=toys("pony", "strategy", offers="{'join'}")).stdout
    )

    pony = next(each for each in listed if each["name"] == "pony")
    assert (pony["status"], pony["distribution"], pony["offers"]) == ("available", "accel-pony", ["join"])


def test_why_says_what_auto_would_take_and_why_not_the_others(toys, accel):
    toys("absent", "device", priority="100", probe="lambda: 'no driver'")
    environment = toys("here", "device", priority="50")

    told = accel("plugins", "--why", environment=environment).stdout

    assert "absent (accel-absent 1.0, priority 100): cannot be used here: no driver" in told
    assert "here (accel-here 1.0, priority 50): the first that is usable" in told
    assert "native (accel-core 0.1.0, priority 0): usable, of lower priority" in told


ENGINE = """from accel_core import Allocation, hooks, implements

class Engine:
    def __init__(self, config, run): ...

    @implements(hooks.allocation)
    def allocation(self, launch):
        import os
        return Allocation(job_id="7", nodes=1, node_rank=0, address="x") if "PONY_JOB" in os.environ else None
"""


def test_why_names_the_launcher_that_a_launch_here_would_take(toys, accel, tmp_path):
    pytest.importorskip("torch")
    card = {"priority": "120", "implementation": "'toy_engine:Engine'", "modules": {"toy_engine": ENGINE}}
    environment = toys("pony", "launcher", **card)
    why = partial(accel, "plugins", "--why", cwd=tmp_path)

    outside = why(environment=environment).stdout
    assert "launcher: `accel launch` here takes torchrun" in outside
    assert "pony (accel-pony 1.0, priority 120): usable, and not taken here" in outside

    within = why(environment={**environment, "PONY_JOB": "7"}).stdout
    assert "launcher: `accel launch` here takes pony" in within
    assert "torchrun (accel-core 0.1.0, priority 0): usable, and not taken here" in within

    (tmp_path / "accel.yaml").write_text("launch: {launcher: pony}")
    assert "launcher: `accel launch` here takes pony" in why(environment=environment).stdout


def test_why_shows_the_traceback_of_a_broken_plugin(toys, accel):
    told = accel("plugins", "--why", environment=toys("pony", "strategy", source="1 / 0")).stdout

    assert "pony (accel-pony 1.0) is broken: ZeroDivisionError" in told
    assert "line 1, in <module>" in told


def test_why_names_the_rivals_of_a_tie_and_what_decides(toys, accel):
    toys("left", "device", priority="50")
    environment = toys("right", "device", priority="50")

    told = accel("plugins", "--why", environment=environment).stdout

    assert "left (accel-left 1.0, priority 50): tied with right: auto refuses to choose, name one" in told
    assert "right (accel-right 1.0, priority 50): tied with left: auto refuses to choose, name one" in told
    assert "native (accel-core 0.1.0, priority 0): usable, of lower priority" in told


LONG = "-".join(["long"] * 60)


@pytest.mark.parametrize("words", ["", "--json", "--why", "doctor"])
def test_a_plugin_with_a_name_of_300_letters_is_listed_as_any_other(tmp_path, words, accel):
    write_distribution(
        tmp_path / "site",
        "accel-long",
        entry_points={"accel_core.device": {LONG: "toy_long:CARD"}},
        modules={"toy_long": card_source(LONG, "device", priority="5")},
    )
    command = [*words.split(), *([LONG] if words == "doctor" else [])]

    ended = accel("plugins", *command, environment={"PYTHONPATH": str(tmp_path / "site")})

    assert (ended.returncode, ended.stderr) == (0, "")
    assert LONG in ended.stdout


def test_the_doctor_is_content_with_a_plugin_that_imports_and_verifies(toys, accel):
    environment = toys(
        "pony",
        "strategy",
        implementation="'toy_parts:Plugin'",
        verify="'toy_parts:verify'",
        modules={"toy_parts": f"{PLUGIN}def verify(): return None\n"},
    )

    ended = accel("plugins", "doctor", "pony", environment=environment)

    assert ended.returncode == 0
    assert "implementation: toy_parts:Plugin ... ok" in ended.stdout
    assert "verify: toy_parts:verify ... ok" in ended.stdout


AILING = {
    "raises": ("raise OSError('half installed')", "OSError: half installed"),
    "exits": ("raise SystemExit('vendor says no')", "SystemExit: vendor says no"),
    "quits": (f"{PLUGIN}def verify():\n    import os\n    os._exit(0)\n", "it ended the process"),
    "unverified": (f"{PLUGIN}def verify(): return 'driver 3 is too old'", "driver 3 is too old"),
}


@pytest.mark.parametrize("case", AILING)
def test_the_doctor_finds_out_what_a_listing_cannot(toys, case, accel):
    source, finding = AILING[case]
    environment = toys(
        "pony",
        "strategy",
        implementation="'toy_parts:Plugin'",
        verify="'toy_parts:verify'",
        modules={"toy_parts": source},
    )

    ended = accel("plugins", "doctor", "pony", environment=environment)

    assert ended.returncode == 1
    assert finding in ended.stdout


def test_the_doctor_shows_the_frames_of_the_plugin_alone(toys, accel):
    source = "def vendor():\n    import toy_vendor\n\nvendor()\n"
    vendor = "def load():\n    raise OSError('no driver')\n\nload()\n"
    environment = toys(
        "pony",
        "strategy",
        implementation="'toy_parts:Plugin'",
        modules={"toy_parts": source, "toy_vendor": vendor},
    )

    shown = accel("plugins", "doctor", "pony", environment=environment).stdout

    frames = [line.strip() for line in shown.splitlines() if line.strip().startswith("File ")]
    assert ["toy_parts.py" in frame for frame in frames] == [True, True]
    assert shown.rstrip().endswith("OSError: no driver")
    assert "\n\n" not in shown


def test_the_doctor_does_not_know_a_plugin_that_is_not_there(accel):
    ended = accel("plugins", "doctor", "nativ")

    assert ended.returncode == 1
    assert "no plugin 'nativ' is installed; did you mean 'native'?" in ended.stderr


def test_check_refuses_a_stack_of_unknown_plugins(accel):
    ended = accel("plugins", "check", "native+pony")

    assert ended.returncode == 1
    assert "no plugin 'pony' is installed" in ended.stderr


def test_env_reports_versions_plugins_and_what_they_say_of_themselves(toys, accel):
    pytest.importorskip("torch")
    source = "def report(): return {'driver': '7.1'}\n"
    card = {"implementation": "'toy_parts:Plugin'", "environment_report": "'toy_parts:report'"}
    environment = toys("pony", "device", **card, modules={"toy_parts": source})

    ended = accel("env", environment={**environment, "ACCEL_DEBUG": "1", "PONY_TOKEN": "secret"})

    assert ended.returncode == 0
    assert "accel-core: 0.1" in ended.stdout
    assert "pony ... driver: 7.1" in ended.stdout
    assert "ACCEL_DEBUG=1" in ended.stdout
    assert "secret" not in ended.stdout


def test_env_survives_a_plugin_that_quits(toys, accel):
    pytest.importorskip("torch")
    card = {"implementation": "'toy_parts:P'", "environment_report": "'toy_parts:report'"}
    environment = toys("pony", "device", **card, modules={"toy_parts": "raise SystemExit"})

    ended = accel("env", environment=environment)

    assert ended.returncode == 0
    assert "pony ... PluginError" in ended.stdout
