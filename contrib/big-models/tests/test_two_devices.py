"""Two devices, host memory and disk in one map."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from big_model_problems import Model, ids, model, shards

from accel_big_models import DispatchedPlugin, dispatch, empty_weights, load, plan, undo, weights_of
from accel_big_models.hooks import enters_of
from accel_big_models.moving import Mover
from accel_big_models.planning import plan_from_map
from accel_core import Accelerator, ConfigError

simulated = pytest.importorskip("accel_testing.simulated.device")
PLACES = {
    "": "sim:0",
    "blocks.1": "sim:1",
    "blocks.2": "cpu",
    "blocks.3": "disk",
    "blocks.4": "sim:1",
    "blocks.5": "cpu",
}
SIZE = sum(parameter.nbytes for parameter in Model().blocks[0].parameters())


@pytest.fixture(scope="module", autouse=True)
def devices() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        simulated.simulate(devices=2)
    except simulated.AccelError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def six(seed: int = 0) -> Model:
    return model(seed, blocks=6)


def empty() -> Model:
    with empty_weights():
        return Model(blocks=6)


@pytest.fixture
def want() -> torch.Tensor:
    return six()(ids())


def seen_in(target: Model) -> list[str]:
    """Return a list that gets the device of each block's inputs and weights."""
    seen: list[str] = []
    for block in target.blocks:
        block.register_forward_pre_hook(
            lambda module, args: seen.extend({str(args[0].device), str(module.gain.device)})
        )
    return seen


@pytest.mark.parametrize("mapped", [True, False])
def test_each_block_is_computed_on_its_device_and_the_output_is_that_of_one(tmp_path, want, mapped):
    folder = shards(tmp_path / "c", six())
    target = load(empty(), folder, plan_from_map(empty(), PLACES), mapped=mapped)
    seen = seen_in(target)
    for _ in range(2):
        got = target(ids())
        assert str(got.device) == "cpu"
        torch.testing.assert_close(got, want)

    assert seen == ["sim:0", "sim:1", "sim:0", "sim:0", "sim:1", "sim:0"] * 2
    assert str(target(ids().to("sim:1")).device) == "sim:1"


@pytest.mark.parametrize("mapped", [True, False])
def test_the_copy_of_the_next_block_begins_before_this_one_ends(tmp_path, monkeypatch, mapped):
    folder = shards(tmp_path / "c", six())
    target = load(empty(), folder, plan_from_map(empty(), PLACES), mapped=mapped)
    events: list[tuple[str, str]] = []
    fine = Mover.start

    def start(self, cargo, slot):
        events.append(("copy", cargo.name))
        return fine(self, cargo, slot)

    monkeypatch.setattr(Mover, "start", start)
    for number, block in enumerate(target.blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(("end", f"blocks.{number}")))
    target(ids())
    events.clear()
    target(ids())

    streamed = ["blocks.2", "blocks.3", "blocks.5"]
    copies = [name for what, name in events if what == "copy"]
    assert {"blocks.3", "blocks.5"} <= set(copies) <= set(streamed)
    for before, following in pairwise(streamed):
        assert events.index(("copy", following)) < events.index(("end", before))


def test_a_plan_fills_one_after_the_other_and_keeps_room_to_stream_on_the_first(want):
    room = 4 * SIZE
    places = plan(six(), {"sim:0": room, "sim:1": 2 * SIZE, "cpu": SIZE, "disk": 10 * SIZE})
    target = dispatch(six(), places)

    assert list(places.used) == ["sim:0", "sim:1", "cpu", "disk"]
    assert places.used["sim:0"] + places.kept <= room
    assert places.used["sim:1"] <= 2 * SIZE
    # The head's weight is the embedding's, so it lies where that does.
    assert places.place_of("embedding.weight") == places.place_of("head.weight") == "sim:0"
    torch.testing.assert_close(target(ids()), want)


def test_without_memory_given_each_device_is_asked_what_is_free(monkeypatch):
    gc.collect()  # models of other tests would leave their memory in the midst of this one
    for number, memory in enumerate(simulated.module().memories):
        monkeypatch.setattr(memory, "total", memory.allocated + (number + 1) * 1_000_000)
    memory = plan(six()).memory

    assert list(memory) == ["sim:0", "sim:1", "cpu", "disk"]
    assert (memory["sim:0"], memory["sim:1"], memory["disk"]) == (1_000_000, 2_000_000, math.inf)


def test_each_device_holds_its_own_part_and_the_first_two_blocks_more():
    first, second = simulated.module().memories
    gc.collect()  # of other tests
    before = first.allocated, second.allocated
    target = dispatch(six(), plan_from_map(six(), PLACES))
    resident = sum(
        each.nbytes for each in target.state_dict(keep_vars=True).values() if "sim" in str(each.device)
    )
    first.peak, second.peak = first.allocated, second.allocated
    target(ids())
    activations, padding = 40_000, 4_000

    assert 2 * SIZE <= second.peak - before[1] <= 2 * SIZE + activations
    assert first.peak - before[0] <= resident - 2 * SIZE + 2 * (SIZE + padding) + activations


def test_a_tied_weight_on_two_devices_is_refused_by_name():
    with pytest.raises(
        ConfigError, match="embedding.weight and head.weight are one tensor.* sim:0 and sim:1"
    ):
        dispatch(six(), plan_from_map(six(), {"": "sim:0", "head": "sim:1"}))


def test_a_weight_that_its_device_has_no_memory_for_is_named_and_nothing_moves(monkeypatch, want):
    target, memory = six(), simulated.module().memories[1]
    places = plan_from_map(target, PLACES)
    with monkeypatch.context() as little:
        little.setattr(memory, "total", memory.allocated + SIZE)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"no memory on sim:1 for blocks\.\d.*, \d+ bytes: tried"
        ):
            dispatch(target, places)

    assert {str(each.device) for each in target.parameters()} == {"cpu"}
    torch.testing.assert_close(dispatch(target, places)(ids()), want)


def test_a_block_that_its_device_has_no_memory_for_is_named_and_the_others_stay(monkeypatch, want):
    target, memory = dispatch(six(), plan_from_map(six(), PLACES)), simulated.module().memories[0]
    gc.collect()  # of other tests
    with monkeypatch.context() as little:
        little.setattr(memory, "total", memory.allocated + SIZE // 2)
        with pytest.raises(torch.OutOfMemoryError, match="no memory on sim:0 for blocks.2, "):
            target(ids())

    torch.testing.assert_close(target(ids()), want)


def test_undo_leaves_values_and_takes_every_hook_off():
    target, state = dispatch(six(), plan_from_map(six(), PLACES)), six().state_dict()
    undo(target)

    assert not enters_of(target)
    places = [str(block.gain.device) for block in target.blocks]
    assert places == ["sim:0", "sim:1", "cpu", "cpu", "sim:1", "cpu"]
    assert all(torch.equal(value.cpu(), state[name]) for name, value in weights_of(target))


def test_a_run_computes_saves_and_loads_such_a_model(tmp_path, want):
    def run() -> Accelerator:
        return Accelerator(device="sim", strategy="dispatched", plugins=[DispatchedPlugin(device_map=PLACES)])

    accelerator = run()
    target = accelerator.prepare(six())
    torch.testing.assert_close(target(ids()).cpu(), want)
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(target, tmp_path / "exported")
    other = run()
    again = other.prepare(six(seed=5))
    other.load_state(tmp_path / "state")
    got = again(ids()).cpu()
    accelerator.end_training()

    torch.testing.assert_close(got, want)
    exported = load(empty(), tmp_path / "exported")
    torch.testing.assert_close(exported(ids()), want)
