"""What is installed becomes rows, whatever is wrong with it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_distributions import card_source

from accel_core.contract.card import API_VERSION
from accel_core.errors import PluginError
from accel_core.plugins.catalog import unknown_device
from accel_core.plugins.discovery import Record, discover, load


def test_a_usable_plugin_is_available_under_its_distribution_and_version(toy_plugin):
    record = toy_plugin("pony")

    assert (record.name, record.slot, record.status, record.reason) == ("pony", "strategy", "available", "")
    assert record.origin == "accel-pony 1.0"


def test_core_comes_through_the_same_door():
    native = {record.name for record in discover({}).records if record.distribution == "accel-core"}

    assert native == {"native", "single", "fp32", "fp16", "bf16", "torchrun", "jsonl"}


def test_a_card_whose_import_raises_is_broken_with_its_traceback(toy_plugin):
    record = toy_plugin("pony", source="import vendor_sdk_that_is_missing\n")

    assert record.status == "broken"
    assert record.reason == "ModuleNotFoundError: No module named 'vendor_sdk_that_is_missing'"
    assert "toy_pony.py" in record.traceback


def test_a_card_that_exits_while_imported_is_broken(toy_plugin):
    record = toy_plugin("pony", source="import sys\nsys.exit('no licence found')\n")

    assert (record.status, record.reason) == ("broken", "SystemExit: no licence found")


def test_ctrl_c_while_cards_are_imported_is_not_swallowed(toy_plugin):
    kick = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1)\n"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            _ = toy_plugin("pony", source=kick).card
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("written_for", "remedy"),
    [("99.0", "upgrade accel-core"), ("1.99", "upgrade accel-core")],
)
def test_a_plugin_for_a_newer_contract_is_incompatible(toy_plugin, written_for, remedy):
    record = toy_plugin("pony", api_version=repr(written_for))

    assert record.status == "incompatible"
    assert record.reason == f"written for API {written_for}, this accel-core serves {API_VERSION}: {remedy}"


def test_a_plugin_for_the_contract_before_the_last_is_incompatible(toy_plugin, monkeypatch):
    monkeypatch.setattr("accel_core.contract.card.API_VERSION", "3.2")

    record = toy_plugin("pony", api_version="'1.9'")
    assert record.reason == "written for API 1.9, this accel-core serves 3.2: upgrade the plugin"
    assert toy_plugin("zebra", api_version="'2.9'").status == "available"


def test_a_newer_plugin_may_use_words_unknown_here_and_still_be_told_what_to_upgrade(toy_plugin):
    record = toy_plugin("pony", api_version="'99.0'", offers="{'teleports'}")

    assert record.status == "incompatible"


def test_a_version_that_is_no_version_is_broken(toy_plugin):
    assert toy_plugin("pony", api_version="1.0").reason == "pony: api_version 1.0 is not 'major.minor'"


def test_two_plugins_of_one_name_name_both_distributions(toy_distribution):
    for number in (1, 2):
        toy_distribution(
            f"accel-pony{number}",
            entry_points={"accel_core.device": {"pony": f"toy_pony{number}:CARD"}},
            modules={f"toy_pony{number}": card_source("pony", "device")},
            version=f"0.{number}",
        )
    rows = [record for record in discover({}).records if record.name == "pony"]

    assert [row.status for row in rows] == ["conflict", "conflict"]
    assert (
        rows[0].reason == "'pony' is provided by accel-pony1 0.1 and accel-pony2 0.2; uninstall one of them"
    )


def test_names_are_one_space_over_all_slots(toy_distribution):
    for slot in ("device", "strategy"):
        toy_distribution(
            f"accel-pony-{slot}",
            entry_points={f"accel_core.{slot}": {"pony": f"toy_{slot}:CARD"}},
            modules={f"toy_{slot}": card_source("pony", slot)},
        )

    assert [r.status for r in discover({}).records if r.name == "pony"] == ["conflict", "conflict"]


def test_one_package_with_one_name_for_two_plugins_is_told_to_rename(toy_distribution):
    toy_distribution(
        "accel-pony",
        entry_points={
            f"accel_core.{slot}": {"pony": f"toy_pony_{slot}:CARD"} for slot in ("command", "device")
        },
        modules={f"toy_pony_{slot}": card_source("pony", slot) for slot in ("command", "device")},
        version="0.1",
    )
    discovery = discover({})
    clash = "accel-pony 0.1 calls its command and device 'pony'; names are unique over all slots: rename one"

    assert [record.reason for record in discovery.records if record.name == "pony"] == [clash, clash]
    assert unknown_device("pony", discovery) == f"'pony' cannot be used: {clash}"


def test_a_stranger_cannot_take_a_name_of_core(toy_distribution):
    toy_distribution(
        "accel-shadow",
        entry_points={"accel_core.precision": {"fp32": "toy_shadow:CARD"}},
        modules={"toy_shadow": card_source("fp32", "precision")},
    )
    discovery = discover({})
    stranger = next(record for record in discovery.records if record.distribution == "accel-shadow")

    assert discovery.get("fp32").origin.startswith("accel-core")
    assert discovery.get("fp32").status == "available"
    assert stranger.status == "conflict"
    assert stranger.reason.endswith("uninstall accel-shadow")


def test_a_blocked_plugin_is_listed_and_not_imported(toy_distribution):
    toy_distribution(
        "accel-pony",
        entry_points={"accel_core.device": {"pony": "toy_pony:CARD"}},
        modules={"toy_pony": card_source("pony", "device")},
    )
    record = discover({"ACCEL_PLUGINS_BLOCK": "zebra, pony"}).get("pony")

    assert (record.status, record.reason) == ("blocked", "blocked by ACCEL_PLUGINS_BLOCK")
    assert "toy_pony" not in sys.modules


@pytest.mark.parametrize("value", ["", " , "])
def test_an_empty_block_list_blocks_nothing(toy_plugin, value):
    toy_plugin("pony")

    assert discover({"ACCEL_PLUGINS_BLOCK": value}).get("pony").status == "available"


def test_core_cannot_be_blocked():
    assert discover({"ACCEL_PLUGINS_BLOCK": "native"}).get("native").status == "available"


def test_an_entry_point_must_point_at_a_card(toy_plugin):
    record = toy_plugin("pony", source="CARD = 'pony'\n")

    assert record.status == "broken"
    assert record.reason == "entry point pony does not point at a Card but at 'pony'"


def test_an_entry_point_must_be_named_like_its_card(toy_plugin):
    record = toy_plugin("pony", source=card_source("zebra"))

    assert record.status == "broken"
    assert record.reason.startswith("entry point accel_core.strategy: pony points at the card of 'zebra'")


def test_an_entry_point_must_stand_in_the_group_of_its_card(toy_plugin):
    record = toy_plugin("pony", "device", source=card_source("pony", "strategy"))

    assert record.reason.endswith("points at the card of 'pony' in slot strategy")


def test_an_unknown_capability_word_is_answered_with_the_nearest(toy_plugin):
    record = toy_plugin("pony", offers="{'bf61'}")

    assert record.status == "broken"
    assert record.reason == "pony: unknown capability 'bf61' in offers; did you mean 'bf16'?"


def test_an_unknown_slot_of_a_card_is_answered_with_the_nearest(toy_plugin):
    record = toy_plugin("pony", source=card_source("pony", "devise"))

    assert record.reason == "pony: unknown slot 'devise'; did you mean 'device'?"


def test_a_misspelt_entry_point_group_is_a_row_too(toy_plugin):
    record = toy_plugin("pony", "devices")

    assert (record.slot, record.status) == ("devices", "broken")
    assert record.reason == "unknown slot 'devices'; did you mean 'device'?"


@pytest.mark.parametrize("name", ["data", "launch", "plugins", "auto"])
def test_words_of_cores_config_are_reserved(toy_plugin, name):
    record = toy_plugin(name)

    assert record.status == "broken"
    assert record.reason == f"{name!r} is a word of core's own config"


@pytest.mark.parametrize("name", ["Pony", "pony_club", "pony--club", "9pony", "pony-"])
def test_names_are_lower_case_words_joined_by_hyphens(toy_plugin, name):
    assert "is not lower-case words" in toy_plugin(name).reason


def test_an_editable_install_found_twice_is_one_plugin(toy_distribution):
    for folder in ("site", "src"):
        toy_distribution(
            "accel-pony" if folder == "site" else "Accel_Pony",
            folder=folder,
            entry_points={"accel_core.device": {"pony": "toy_pony:CARD"}},
            modules={"toy_pony": card_source("pony", "device")},
        )

    assert [r.status for r in discover({}).records if r.name == "pony"] == ["available"]


def test_an_older_version_further_down_the_path_does_not_clash(toy_distribution):
    for version in ("0.1", "0.2"):
        toy_distribution(
            "accel-pony",
            folder=version,
            version=version,
            entry_points={"accel_core.device": {"pony": "toy_pony:CARD"}},
            modules={"toy_pony": card_source("pony", "device")},
        )

    assert discover({}).get("pony").origin == "accel-pony 0.2"


def test_a_half_removed_distribution_is_still_a_row(toy_distribution):
    info = toy_distribution(
        "accel-pony", entry_points={"accel_core.device": {"pony": "toy_pony:CARD"}}, modules={"other": ""}
    )
    (info / "METADATA").unlink()
    record = discover({}).get("pony")

    assert (record.status, record.reason) == ("broken", "ModuleNotFoundError: No module named 'toy_pony'")


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe accel_core.device",
        b"accel_core.\nno section\n[accel_core.device\n= :\n",
        b"[accel_core.]\na=b",
    ],
)
def test_damaged_metadata_harms_nobody(toy_plugin, toy_distribution, damage):
    info = toy_distribution("accel-damaged", entry_points={}, modules={"damaged": ""})
    (info / "entry_points.txt").write_bytes(damage)

    assert toy_plugin("pony").status == "available"


def test_a_probe_gives_the_reason_why_a_plugin_is_unavailable(toy_plugin):
    record = toy_plugin("pony", probe="lambda: 'no driver'")

    assert (record.status, record.reason) == ("unavailable", "no driver")


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("lambda: 1 / 0", "its probe raised ZeroDivisionError: division by zero"),
        ("lambda: exit(3)", "its probe raised SystemExit: 3"),
    ],
)
def test_a_bad_probe_makes_its_plugin_unavailable(toy_plugin, probe, reason):
    record = toy_plugin("pony", probe=probe)

    assert (record.status, record.reason) == ("unavailable", reason)


def test_a_probe_is_asked_once_and_only_when_the_status_is_wanted(toy_plugin):
    record = toy_plugin("pony", source=f"calls = []\n{card_source('pony', probe='lambda: calls.append(1)')}")
    assert record.card is not None
    module = sys.modules["toy_pony"]
    asked_by_discovery = len(module.calls)

    assert (record.status, record.reason, record.status) == ("available", "", "available")
    assert (asked_by_discovery, len(module.calls)) == (0, 1)


def test_files_made_beside_the_program_leave_the_records_as_they_were(toy_plugin, tmp_path, monkeypatch):
    record = toy_plugin("pony", source=f"calls = []\n{card_source('pony', probe='lambda: calls.append(1)')}")
    monkeypatch.syspath_prepend(tmp_path)
    before = discover({})
    assert before.get("pony").status == "available"
    for number in range(3):
        (tmp_path / f"{number}.log").touch()
        os.utime(tmp_path, (number, number))
        assert discover({}) is before
    assert len(sys.modules[record.target.partition(":")[0]].calls) == 1


def test_records_that_discovery_has_replaced_are_collected(toy_plugin):
    record = toy_plugin("pony", source=card_source("pony", implementation="'toy_pony:CARD'"))
    assert record.implementation is record.card
    replaced = weakref.ref(record)
    del record
    for name in ("zebra", "mule", "ass"):
        toy_plugin(name)
    gc.collect()
    assert replaced() is None


def test_a_slot_lists_the_highest_priority_first_and_then_by_name(toy_plugin):
    for name, priority in [("zebra", "100"), ("pony", "100"), ("mule", "None"), ("ass", "7")]:
        toy_plugin(name, "extension", priority=priority)

    names = [record.name for record in discover({}).of("extension")]
    assert [name for name in names if name in ("zebra", "pony", "mule", "ass")] == [
        "pony",
        "zebra",
        "ass",
        "mule",
    ]


@pytest.fixture
def pony() -> Record:
    return Record(name="pony", slot="device", distribution="accel-pony", version="0.3")


def test_loading_gives_what_the_path_names(pony):
    assert load(pony, "accel_core.plugins.discovery:Record.origin") is Record.origin


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vendor_that_is_missing", "ModuleNotFoundError: No module named 'vendor_that_is_missing'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            "class Plugin: pass",
            "AttributeError: module 'toy_pony' has no attribute 'Plugni'; did you mean 'Plugin'?",
        ),
    ],
)
def test_loading_what_fails_says_who_and_what_to_do(
    toy_distribution: Callable[..., Path], pony: Record, source: str, found: str
):
    toy_distribution("accel-pony", entry_points={}, modules={"toy_pony": source})
    with pytest.raises(PluginError) as caught:
        load(pony, "toy_pony:Plugni")

    asked, was, remedy = str(caught.value).splitlines()
    assert asked == "device plugin 'pony' (accel-pony 0.3) cannot be imported from toy_pony:Plugni"
    assert was == found
    assert "`accel plugins doctor pony`" in remedy
    assert caught.value.__cause__ is not None
    assert (caught.value.plugin, caught.value.distribution) == ("pony", "accel-pony 0.3")
