"""Level 0: a plugin is listed, configured and launched without heavy imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from typing import Any

import pytest

from accel_core import API_VERSION, CAPABILITIES, Record, discover
from accel_testing.kit.checks import concerns
from accel_testing.kit.deadline import seconds
from accel_testing.kit.stack import OUTSIDE_OF_RUNS, SLOTS
from accel_testing.kit.tasks import stack_members

pytestmark = concerns(*SLOTS)

PROBE_SECONDS = 0.02
"""Four times the contract's limit, for the best of several calls; patience does not multiply a promise."""
CORE = "accel-core"


@cache
def observed(name: str, distribution: str) -> dict[str, Any]:
    module = "accel_testing.kit.tasks_packaging"
    ended = subprocess.run(
        [sys.executable, "-m", module, name, distribution],
        capture_output=True,
        text=True,
        timeout=seconds(),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture
def facts(plugin: Record) -> dict[str, Any]:
    """Return the plugin as a fresh interpreter sees it."""
    return observed(plugin.name, plugin.distribution)


def test_the_card_describes_itself(plugin: Record) -> None:
    card = plugin.card
    assert card is not None
    assert re.fullmatch(r"\d+\.\d+", card.api_version)
    assert card.api_version.partition(".")[0] <= API_VERSION.partition(".")[0]
    assert card.summary.strip()
    assert card.implementation, "the card names no implementation"
    assert card.offers <= CAPABILITIES.keys()


def test_the_cards_words_are_no_plugins_names(plugin: Record) -> None:
    assert plugin.card is not None
    names = {record.name: record.origin for record in discover().records}
    taken = {word: names[word] for word in plugin.card.also if word in names}
    assert taken == {}, "a word of `also` that is a plugin's name means that plugin"


def test_the_card_loads_nothing_heavy(facts: dict[str, Any]) -> None:
    assert facts["card"]["loads"] == [], "importing the card imports third parties"


def test_the_probe_is_quick_and_light(facts: dict[str, Any]) -> None:
    probe = facts["probe"]
    assert probe["answer"] in ("NoneType", "str"), "a probe answers None or the reason"
    assert probe["loads"] == [], "the probe imports third parties"
    assert probe["seconds"] <= PROBE_SECONDS


def test_the_config_class_is_light(facts: dict[str, Any]) -> None:
    if "config" in facts:
        assert facts["config"]["loads"] == [], "importing the config class imports third parties"


def test_options_are_declared_in_full(plugin: Record, facts: dict[str, Any]) -> None:
    config = facts.get("config")
    if config is not None:
        assert config["attrs"], "the config class is not an attrs class"
        assert config["frozen"]
        assert config["positional"] == [], "options are keyword-only"
        assert config["helpless"] == [], "options without help= (use accel_core.option)"
        assert config["repeatable"], "two configs made of defaults differ"
        command = [sys.executable, "-m", "accel_core", "config", "schema", plugin.name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds(), check=False)
        assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("field", "answer"),
    [("launch_environment", "a mapping of strings"), ("visible_devices", "a number, or None")],
)
def test_what_the_launcher_calls_is_light(facts: dict[str, Any], field: str, answer: str) -> None:
    called = facts.get(field)
    if called is not None:
        assert called["loads"] == [], f"{field} imports third parties"
        assert called["is_right"], f"{field} gives {answer}"


def test_types_are_shipped(facts: dict[str, Any]) -> None:
    assert facts["typed"], "the package has no py.typed: users' type checkers see nothing of it"


def test_requirements_leave_torch_alone(plugin: Record) -> None:
    if plugin.distribution == CORE:
        return
    requirements = [line for line in metadata.requires(plugin.distribution) or () if "extra ==" not in line]
    names = {
        re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in requirements
    }
    assert CORE in names, f"{plugin.distribution} does not require {CORE}"
    assert "torch" not in names, "requiring torch lets pip replace a vendor's build of it"


@concerns(*(slot for slot in SLOTS if slot not in OUTSIDE_OF_RUNS))
def test_the_stack_binds(run: Any, stack: Any) -> None:
    (members,) = run(stack_members)
    named = {record.name for record in stack.records if record.slot not in OUTSIDE_OF_RUNS}
    assert named <= set(members)
