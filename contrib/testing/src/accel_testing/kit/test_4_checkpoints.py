"""Level 4: what was saved goes on: here, natively, in other worlds, and after a kill."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import pytest

from accel_testing.kit import work_awkward
from accel_testing.kit import work_checkpoints as work
from accel_testing.kit.compare import assert_near
from accel_testing.kit.plugin import Kit, requires
from accel_testing.kit.refused import accepted
from accel_testing.kit.stack import TestedStack
from accel_testing.kit.work import Way
from accel_testing.kit.work_checkpoints import Seen
from accel_testing.processes import ProcessError

Run = Callable[..., list[Any]]
KILLS = (0.4, 1.7)
NOISE = 0.3


@pytest.fixture
def own(kit: Kit, world: int) -> Way:
    """The stack under test, in a world of this size."""
    return next(way for way in kit.ways if way.world == world and way.own)


class Resumed:
    """A checkpoint of each way, and what each way makes of each; everything is trained once."""

    def __init__(self, kit: Kit, run: Run, noise: float) -> None:
        self._kit, self._run, self._noise = kit, run, noise
        self._folder = str(kit.folder / f"checkpoints-{noise}")

    def _in_world(self, world: int) -> list[Way]:
        ways = [way for way in self._kit.ways if way.world == world]
        return [way for way in ways if way.own] if self._noise else ways

    def original(self, way: Way) -> list[Seen]:
        """What the ranks of the way saw after they had saved."""
        return [_seen(of_rank, str(way)) for of_rank in self._saved(way.world)]

    def _saved(self, world: int) -> list[Any]:
        """What the ranks of each way of this size saw after they had saved, or why they could not."""
        given = self._folder, self._in_world(world), self._noise
        found: list[Any] = self._kit.once(
            ("saved", world, self._noise), lambda: self._run(work.save, *given, world=world)
        )
        return found

    def by(self, way: Way, saver: Way) -> list[Seen]:
        """What the ranks of the way saw when they went on from the saver's checkpoint."""
        ways = self._in_world(way.world)
        saved = [str(way)] if self._noise else [str(each) for each in self._kit.ways]
        self.original(saver)
        for each in () if self._noise else self._kit.ways:
            self._saved(each.world)  # one that failed is the failure of its own pairs
        given = self._folder, saved, ways, self._noise
        found = self._kit.once(
            ("resumed", way.world, self._noise), lambda: self._run(work.resume, *given, world=way.world)
        )
        return [_seen(of_rank[str(saver)], str(way)) for of_rank in found]


def _seen(found: Mapping[str, Any], way: str) -> Seen:
    if isinstance(found[way], str):
        pytest.fail(f"{way}: {found[way]}", pytrace=False)
    seen: Seen = found[way]
    return seen


@pytest.fixture
def resumed(kit: Kit, run: Run) -> Resumed:
    """Trainings without noise."""
    return Resumed(kit, run, 0.0)


def test_a_run_goes_on_as_if_nothing_had_happened(resumed: Resumed, own: Way) -> None:
    for before, after in zip(resumed.original(own), resumed.by(own, own), strict=True):
        assert after.samples == before.samples, "the data goes on in another order"
        assert after.rates == before.rates, "the learning rate is another"
        if own.world <= 2:  # more summands may be added in another order
            assert after.losses == before.losses, "losses are not bitwise the same"


def test_cross_resume(resumed: Resumed, stack: TestedStack, saver: Way, loader: Way) -> None:
    before, after = resumed.original(saver), resumed.by(loader, saver)
    assert _together(after) == _together(before), "the data goes on in another order"
    low = "mixed_precision" in stack.arguments
    assert_near("losses", _means(after), _means(before), low_precision=low)
    assert_near("rates", after[0].rates, before[0].rates)


@requires("rng")
def test_random_streams_go_on(kit: Kit, run: Run, own: Way) -> None:
    noisy = Resumed(kit, run, NOISE)
    for before, after in zip(noisy.original(own), noisy.by(own, own), strict=True):
        assert after.draws == before.draws, "random streams start anew"
        if own.world <= 2:
            assert after.losses == before.losses, "dropout is not that of the run that was saved"


def test_state_has_the_names_of_the_users_model(run: Run, world: int) -> None:
    for found, expected in run(work.names, world=world):
        assert found == expected


def test_replicas_are_equal(run: Run, world: int) -> None:
    found = run(work.replicas, world=world)
    digests: dict[str, set[str]] = {}
    for of_rank in found:
        for box, digest in of_rank.items():
            digests.setdefault(box, set()).add(digest)
    assert [box for box, different in digests.items() if len(different) > 1] == []


def test_what_does_not_fit_is_refused_and_nothing_touched(run: Run, resumed: Resumed, own: Way) -> None:
    resumed.original(own)
    for said, lacking, touched in run(work.misfit, resumed._folder, str(own), world=own.world):
        missing = said.partition("missing in the checkpoint: ")[2]
        assert any(f"unit0: model/{name}" in missing for name in lacking), said
        assert not touched


@pytest.mark.parametrize("at_once", [True, False], ids=["before a step", "after a step"])
def test_a_resumed_run_can_be_saved_and_resumed_again(
    run: Run, resumed: Resumed, own: Way, at_once: bool
) -> None:
    resumed.original(own)
    for saved, loaded in run(work.saved_again, resumed._folder, str(own), at_once, world=own.world):
        assert loaded == saved, "what was loaded is not what was saved after a resume"


def test_a_killed_save_leaves_a_checkpoint(kit: Kit, run: Run, world: int) -> None:
    folder = kit.folder / f"killed-{world}"
    folder.mkdir()
    for instant in KILLS:
        with pytest.raises(ProcessError) as killed:
            run(work.killed, str(folder), instant, world=world)
        # Only the signal may have ended it: another error is the plugin's, whatever is left on the disk.
        assert killed.value.kind == f"exit {-signal.SIGALRM}", killed.value
    assert min(run(work.survived, str(folder), world=world)) > 2 * len(KILLS) - 1


class Awkward:
    """A checkpoint of the awkward model, and what one native process makes of it."""

    def __init__(self, kit: Kit, run: Run, world: int) -> None:
        self._kit, self._run = kit, run
        self.folder = str(kit.folder / f"awkward-{world}")
        ranks, self.without = accepted(run, work_awkward.saved, self.folder, world=world)
        self.saved: dict[str, Any] = ranks[0]

    @cached_property
    def by_hand(self) -> work_awkward.Plain:
        """What the plain loop ends with."""
        plain: work_awkward.Plain
        (plain,) = self._run(work_awkward.by_hand, 0.9, self.without)
        return plain

    @cached_property
    def natively(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """State of model and optimizer, loaded by the native way, which saves it again beside."""
        way = next(way for way in self._kit.ways if str(way) == "native@1")
        again = f"{self.folder}-again"
        found: tuple[dict[str, Any], dict[str, Any]]
        (found,) = self._run(work_awkward.loaded, way, self.folder, again, self.without)
        return found


@pytest.fixture
def awkward(kit: Kit, run: Run, world: int) -> Awkward:
    """Saved once in a world."""
    kit.require_own_network()
    return kit.once(("awkward", world), lambda: Awkward(kit, run, world))


def test_a_checkpoint_holds_what_state_dict_names(run: Run, awkward: Awkward) -> None:
    plain = awkward.by_hand
    (names,) = run(work_awkward.exported, awkward.folder)
    assert {*names} == {*plain.names}
    _, loaded = awkward.natively
    assert loaded.keys() == plain.optimizer.keys()
    assert loaded.get("tally") == plain.optimizer.get("tally"), "the optimizer's own state is lost"
    assert work_awkward.keys_of(loaded) == work_awkward.keys_of(plain.optimizer), (
        "state of parameters is lost"
    )


def test_a_checkpoint_is_the_same_bit_for_bit_elsewhere(run: Run, awkward: Awkward, own: Way) -> None:
    model, optimizer = awkward.natively
    work_awkward.assert_equal(model, awkward.saved)
    work_awkward.assert_moments(optimizer, awkward.by_hand.optimizer)
    back, *_ = run(
        work_awkward.loaded, own, f"{awkward.folder}-again", None, awkward.without, world=own.world
    )
    work_awkward.assert_equal(back[0], awkward.saved)


def _means(ranks: list[Seen]) -> list[float]:
    return [sum(losses) / len(ranks) for losses in zip(*(each.losses for each in ranks), strict=True)]


def _together(ranks: list[Seen]) -> list[list[int]]:
    """The samples of each step, whoever read them."""
    return [sorted({*chain(*batches)}) for batches in zip(*(each.samples for each in ranks), strict=True)]
