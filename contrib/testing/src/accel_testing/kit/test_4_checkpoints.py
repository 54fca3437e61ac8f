"""Level 4: a saved run continues here, natively, elsewhere, and after a kill."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import pytest

from accel_testing.kit import tasks_awkward
from accel_testing.kit import tasks_checkpoints as tasks
from accel_testing.kit.checks import concerns, quick, requires
from accel_testing.kit.compare import assert_near
from accel_testing.kit.plugin import Kit
from accel_testing.kit.refused import accepted
from accel_testing.kit.stack import TestedStack
from accel_testing.kit.tasks import Scenario
from accel_testing.kit.tasks_checkpoints import Seen
from accel_testing.processes import ProcessError

pytestmark = concerns("device", "precision", "strategy", "extension")

Run = Callable[..., list[Any]]
KILLS = (0.4, 1.7)
NOISE = 0.3


@pytest.fixture
def own(kit: Kit, world: int) -> Scenario:
    """Return the stack under test, in a world of this size."""
    return next(scenario for scenario in kit.scenarios if scenario.world == world and scenario.own)


class Resumed:
    """Checkpoints of all scenarios, resumed in all of them; each trains once."""

    def __init__(self, kit: Kit, run: Run, noise: float) -> None:
        self._kit, self._run, self._noise = kit, run, noise
        self._folder = str(kit.folder / f"checkpoints-{noise}")

    def _in_world(self, world: int) -> list[Scenario]:
        scenarios = [scenario for scenario in self._kit.scenarios if scenario.world == world]
        return [scenario for scenario in scenarios if scenario.own] if self._noise else scenarios

    def original(self, scenario: Scenario) -> list[Seen]:
        """Return the numbers of a scenario's ranks after they saved."""
        return [_seen(of_rank, str(scenario)) for of_rank in self._saved(scenario.world)]

    def _saved(self, world: int) -> list[Any]:
        """Return the numbers of each scenario of this size, or its error."""
        given = self._folder, self._in_world(world), self._noise
        found: list[Any] = self._kit.once(
            ("saved", world, self._noise), lambda: self._run(tasks.save, *given, world=world)
        )
        return found

    def by(self, scenario: Scenario, saver: Scenario) -> list[Seen]:
        """Return the numbers of a scenario's ranks after the saver's checkpoint."""
        scenarios = self._in_world(scenario.world)
        saved = [str(scenario)] if self._noise else [str(each) for each in self._kit.scenarios]
        self.original(saver)
        for each in () if self._noise else self._kit.scenarios:
            self._saved(each.world)  # one that failed is the failure of its own pairs
        given = self._folder, saved, scenarios, self._noise
        found = self._kit.once(
            ("resumed", scenario.world, self._noise),
            lambda: self._run(tasks.resume, *given, world=scenario.world),
        )
        return [_seen(of_rank[str(saver)], str(scenario)) for of_rank in found]


def _seen(found: Mapping[str, Any], scenario: str) -> Seen:
    if isinstance(found[scenario], str):
        pytest.fail(f"{scenario}: {found[scenario]}", pytrace=False)
    seen: Seen = found[scenario]
    return seen


@pytest.fixture
def resumed(kit: Kit, run: Run) -> Resumed:
    """Trainings without noise."""
    return Resumed(kit, run, 0.0)


@quick
def test_a_run_goes_on_as_if_nothing_had_happened(resumed: Resumed, own: Scenario) -> None:
    for before, after in zip(resumed.original(own), resumed.by(own, own), strict=True):
        assert after.samples == before.samples, "the data goes on in another order"
        assert after.rates == before.rates, "the learning rate is another"
        if own.world <= 2:  # more summands may be added in another order
            assert after.losses == before.losses, "losses are not bitwise the same"


def test_cross_resume(resumed: Resumed, stack: TestedStack, saver: Scenario, loader: Scenario) -> None:
    before, after = resumed.original(saver), resumed.by(loader, saver)
    assert _together(after) == _together(before), "the data goes on in another order"
    low = "mixed_precision" in stack.arguments
    assert_near("losses", _means(after), _means(before), low_precision=low)
    assert_near("rates", after[0].rates, before[0].rates)


@requires("rng")
def test_random_streams_go_on(kit: Kit, run: Run, own: Scenario) -> None:
    noisy = Resumed(kit, run, NOISE)
    for before, after in zip(noisy.original(own), noisy.by(own, own), strict=True):
        assert after.draws == before.draws, "random streams start anew"
        if own.world <= 2:
            assert after.losses == before.losses, "dropout is not that of the run that was saved"


def test_state_has_the_names_of_the_users_model(run: Run, world: int) -> None:
    for found, expected in run(tasks.names, world=world):
        assert found == expected


def test_replicas_are_equal(run: Run, world: int) -> None:
    found = run(tasks.replicas, world=world)
    digests: dict[str, set[str]] = {}
    for of_rank in found:
        for box, digest in of_rank.items():
            digests.setdefault(box, set()).add(digest)
    assert [box for box, different in digests.items() if len(different) > 1] == []


def test_what_does_not_fit_is_refused_and_nothing_touched(run: Run, resumed: Resumed, own: Scenario) -> None:
    resumed.original(own)
    for said, lacking, touched in run(tasks.misfit, resumed._folder, str(own), world=own.world):
        assert lacking, "the larger network has no weights that the other lacks by name"
        missing = said.partition("missing in the checkpoint: ")[2]
        assert any(f"unit0: model/{name}" in missing for name in lacking), said
        assert not touched


@pytest.mark.parametrize("at_once", [True, False], ids=["before a step", "after a step"])
def test_a_resumed_run_can_be_saved_and_resumed_again(
    run: Run, resumed: Resumed, own: Scenario, at_once: bool
) -> None:
    resumed.original(own)
    for saved, loaded in run(tasks.saved_again, resumed._folder, str(own), at_once, world=own.world):
        assert loaded == saved, "what was loaded is not what was saved after a resume"


def test_a_killed_save_leaves_a_checkpoint(kit: Kit, run: Run, world: int) -> None:
    folder = kit.folder / f"killed-{world}"
    folder.mkdir()
    for instant in KILLS:
        with pytest.raises(ProcessError) as killed:
            run(tasks.killed, str(folder), instant, world=world)
        # Only the signal may have ended it: another error is the plugin's, whatever is left on the disk.
        assert killed.value.kind == f"exit {-signal.SIGALRM}", killed.value
    assert min(run(tasks.survived, str(folder), world=world)) > 2 * len(KILLS) - 1


class Awkward:
    """A checkpoint of the awkward model, and what one native process makes of it."""

    def __init__(self, kit: Kit, run: Run, world: int) -> None:
        self._kit, self._run = kit, run
        self.folder = str(kit.folder / f"awkward-{world}")
        ranks, self.without = accepted(run, tasks_awkward.saved, self.folder, world=world)
        self.saved: dict[str, Any] = ranks[0]

    @cached_property
    def by_hand(self) -> tasks_awkward.Plain:
        """The end of the plain loop."""
        plain: tasks_awkward.Plain
        (plain,) = self._run(tasks_awkward.by_hand, 0.9, self.without)
        return plain

    @cached_property
    def natively(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load the state natively, and save it again beside."""
        scenario = next(scenario for scenario in self._kit.scenarios if str(scenario) == "native@1")
        again = f"{self.folder}-again"
        found: tuple[dict[str, Any], dict[str, Any]]
        (found,) = self._run(tasks_awkward.loaded, scenario, self.folder, again, self.without)
        return found


@pytest.fixture
def awkward(kit: Kit, run: Run, world: int) -> Awkward:
    """Save once in a world."""
    kit.require_own_network()
    return kit.once(("awkward", world), lambda: Awkward(kit, run, world))


def test_a_checkpoint_holds_what_state_dict_names(run: Run, awkward: Awkward) -> None:
    plain = awkward.by_hand
    (names,) = run(tasks_awkward.exported, awkward.folder)
    assert {*names} == {*plain.names}
    _, loaded = awkward.natively
    assert loaded.keys() == plain.optimizer.keys()
    assert tasks_awkward.keys_of(loaded) == tasks_awkward.keys_of(plain.optimizer), (
        "state of parameters is lost"
    )


def test_a_checkpoint_is_the_same_bit_for_bit_elsewhere(run: Run, awkward: Awkward, own: Scenario) -> None:
    model, optimizer = awkward.natively
    tasks_awkward.assert_equal(model, awkward.saved)
    tasks_awkward.assert_moments(optimizer, awkward.by_hand.optimizer)
    back, *_ = run(
        tasks_awkward.loaded, own, f"{awkward.folder}-again", None, awkward.without, world=own.world
    )
    tasks_awkward.assert_equal(back[0], awkward.saved)


def _means(ranks: list[Seen]) -> list[float]:
    return [sum(losses) / len(ranks) for losses in zip(*(each.losses for each in ranks), strict=True)]


def _together(ranks: list[Seen]) -> list[list[int]]:
    """Return the samples of each step, of all readers."""
    return [sorted({*chain(*batches)}) for batches in zip(*(each.samples for each in ranks), strict=True)]
