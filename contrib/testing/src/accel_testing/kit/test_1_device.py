"""Level 1: the device holds models and batches, and keeps its promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from accel_core import CAPABILITIES
from accel_testing.kit import tasks_device as tasks
from accel_testing.kit.checks import concerns, requires
from accel_testing.kit.stack import TestedStack

# Other slots are named at the checks of hooks that they implement, too.
pytestmark = concerns("device", "extension")

Run = Callable[..., list[Any]]
MEGABYTES_4 = 4_000_000


def test_the_run_is_on_the_cards_device(run: Run, stack: TestedStack) -> None:
    (found,) = run(tasks.chosen)
    if stack.torch_device is not None:
        assert found["type"] == stack.torch_device
    assert found["indexed"], "the device has no index: two processes could not be told apart"
    assert found["computes"] == 6.0


def test_capabilities_are_words_the_card_offers(run: Run, stack: TestedStack) -> None:
    (found,) = run(tasks.chosen)
    assert set(found["capabilities"]) <= CAPABILITIES.keys()
    assert set(found["capabilities"]) <= stack.offers, "a chip can do less than its card offers, not more"


@concerns("device", "precision", "strategy", "extension")
def test_models_are_placed_whole(run: Run) -> None:
    (found,) = run(tasks.placed)
    assert found["devices"] == [found["type"]]
    assert found["tied"], "tied weights came apart"
    assert found["frozen"], "a frozen parameter was unfrozen"
    assert found["optimizer holds the parameters"]


@concerns("device", "strategy", "extension")
def test_seeding_repeats_what_is_drawn(run: Run) -> None:
    ((first, again, other),) = run(tasks.seeded)
    assert first == again
    assert first != other


@concerns("device", "strategy", "extension")
@requires("rng")
def test_random_streams_are_saved_and_restored(run: Run) -> None:
    (found,) = run(tasks.random_streams)
    assert found["types"] == ["torch.uint8 cpu"]
    assert found["device stream"], "the device drew other numbers after its stream was restored"
    assert found["host stream"]


@concerns("device", "strategy", "extension")
@requires("rng")
def test_every_stream_follows_the_seed_and_is_restored(run: Run) -> None:
    (found,) = run(tasks.seeded_streams)
    assert found == {"not repeated by a seed": [], "the same under another seed": [], "not restored": []}


def test_memory_is_reported_in_bytes(run: Run) -> None:
    (found,) = run(tasks.memory)
    before, held, after = found["stats"]
    known = {"allocated", "reserved", "peak", "total", "free"}
    assert {key for stats in found["stats"] for key in stats} <= known
    assert all(type(value) is int and value >= 0 for stats in found["stats"] for value in stats.values())
    if found["claimed"]:
        assert held["allocated"] - before["allocated"] >= MEGABYTES_4
        assert after["allocated"] - before["allocated"] < MEGABYTES_4
        assert held.get("peak", held["allocated"]) >= held["allocated"]
    if {"total", "free", "allocated"} <= held.keys():
        assert held["free"] <= held["total"] - held["allocated"]


@requires("fp8")
def test_float8_matrices_are_multiplied(run: Run) -> None:
    (found,) = run(tasks.float8)
    if found["multiplied"]:
        assert found["error"] <= 0.1, "a product of float8 matrices is wrong by more than their rounding"


@concerns("device", "strategy", "extension")
def test_services_answer(run: Run) -> None:
    run(tasks.services)


def test_the_host_does_not_wait_for_the_device_in_a_step(run: Run, stack: TestedStack) -> None:
    alone = evolve(stack, records=[it for it in stack.records if it.slot != "strategy"])
    lacking = {need for it in alone.records if it.card for need in it.card.needs} - alone.offers
    if lacking:
        pytest.skip(f"a step without a strategy: {' and '.join(sorted(lacking))} would be lacking")
    assert run(tasks.waits) == [""]
