"""On a device, the next block comes on a stream of its own while this one computes."""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from big_model_problems import Model, ids, model, shards

from accel_big_models import (
    DispatchedPlugin,
    dispatch,
    empty_weights,
    load,
    moving,
    offload,
    undo,
    weights_of,
)
from accel_big_models.hooks import enters_of
from accel_big_models.moving import Mover
from accel_big_models.planning import plan, plan_from_map
from accel_core import Accelerator

simulated = pytest.importorskip("accel_testing.simulated.device")


@pytest.fixture(scope="module", autouse=True)
def device():
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        simulated.simulate()
    except simulated.AccelError as error:
        pytest.skip(str(error))
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def empty() -> Model:
    with empty_weights():
        return Model()


@pytest.fixture
def want():
    return model()(ids())


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_an_offloaded_model_computes_on_the_device_and_returns_to_the_host(to, want):
    target = offload(model(), to, device="sim")
    seen = []
    target.blocks[1].register_forward_pre_hook(
        lambda module, args: seen.append((args[0].device.type, module.gain.device.type))
    )
    with torch.no_grad():
        for _ in range(2):
            got = target(ids())
            assert got.device.type == "cpu"
            torch.testing.assert_close(got, want)

    assert seen == [("sim", "sim")] * 2
    assert {it.device.type for it in target.parameters()} == {"cpu"}
    state = model().state_dict()
    assert all(torch.equal(value.cpu(), state[name]) for name, value in weights_of(target))


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_a_write_to_a_weight_in_host_memory_counts_from_the_next_forward_on(to):
    target, expected = offload(model(), to, device="sim"), model()
    with torch.no_grad():
        for each in (target, expected):
            each(ids())  # the next forward's first block is under way then
            for number, block in enumerate(each.blocks):
                block.gain.mul_(number + 2)
        torch.testing.assert_close(target(ids()), expected(ids()))
        torch.testing.assert_close(target(ids()), expected(ids()))


def test_a_write_that_torch_does_not_count_counts_too():
    target, expected = offload(model(), "cpu", device="sim"), model()
    with torch.no_grad():
        for each in (target, expected):
            each(ids())  # the next forward's first block may be under way then
            for number, block in enumerate(each.blocks):
                block.gain.data.mul_(number + 2)
        torch.testing.assert_close(target(ids()), expected(ids()))


def test_one_map_of_a_device_the_host_and_a_disk(tmp_path, want):
    folder = shards(tmp_path / "c", model())
    places = {"": "sim:0", "blocks.1": "cpu", "blocks.2": "disk", "blocks.3": "disk"}
    for mapped in (True, False):
        target = load(empty(), folder, plan_from_map(empty(), places), mapped=mapped)
        with torch.no_grad():
            torch.testing.assert_close(target(ids()), want)
            torch.testing.assert_close(target(ids()), want)
        assert target.blocks[0].gain.device.type == "sim"
        undo(target)
        assert target.blocks[2].gain.device.type == "cpu"


class Caching(torch.nn.Module):
    """Tells where its cache arrives, and returns it as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x, cache):
        self.seen = x.device.type, cache.device.type
        return {"x": self.layer(x), "cache": cache.to("sim")}


@pytest.mark.parametrize(("skip_keys", "place"), [((), "sim"), (("cache",), "cpu")])
def test_values_of_skipped_keys_stay_where_they_are(skip_keys, place):
    target = Caching()
    dispatch(target, plan_from_map(target, {"": "sim"}), skip_keys=skip_keys)
    out = target(torch.ones(2, 3), cache=torch.ones(2))

    assert target.seen == ("sim", place)
    assert (out["x"].device.type, out["cache"].device.type) == ("cpu", "sim" if skip_keys else "cpu")


def test_the_copy_of_the_next_block_begins_before_this_one_ends(monkeypatch):
    target = offload(model(), "cpu", device="sim")
    events = []
    fine = Mover.start

    def start(self, cargo, slot):
        events.append(("copy", cargo.name))
        return fine(self, cargo, slot)

    monkeypatch.setattr(Mover, "start", start)
    for number, block in enumerate(target.blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(("end", f"blocks.{number}")))
    with torch.no_grad():
        target(ids())
        events.clear()
        target(ids())

    copies = [name for what, name in events if what == "copy"]
    for number in range(3):
        following = f"blocks.{number + 1}"
        if following in copies:
            assert events.index(("copy", following)) < events.index(("end", f"blocks.{number}"))
    assert {"blocks.1", "blocks.2", "blocks.3"} <= {*copies, "blocks.1"}


def test_what_is_on_disk_is_read_one_block_further_ahead(monkeypatch):
    target = offload(model(), "disk", device="sim", mapped=False)
    staged = []
    fine = Mover.stage
    monkeypatch.setattr(Mover, "stage", lambda self, cargo: (staged.append(cargo.name), fine(self, cargo)))
    began = []
    for number, block in enumerate(target.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: began.append((number, list(staged))))
    with torch.no_grad():
        target(ids())

    assert "blocks.2" in began[0][1]
    assert "blocks.3" in began[1][1]


def test_the_host_never_waits_for_the_device_while_blocks_come_from_memory():
    target = offload(model(), "cpu", device="sim")
    inputs = ids().to("sim")
    with torch.no_grad():
        target(inputs)
        before = simulated.module().waits
        target(inputs)

    # The CPU's pages are not pinned for a simulated device; each copy asks not to wait.
    assert simulated.module().waits == before


def test_a_forward_ends_once_no_copy_reads_pinned_weights_any_more(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    target = offload(model(), "cpu", device="sim")
    inputs = ids().to("sim")
    inside = []
    target.norm.register_forward_hook(lambda *_: inside.append(simulated.module().waits))
    with torch.no_grad():
        for _ in range(2):
            before = simulated.module().waits
            target(inputs)
            assert (inside[-1], simulated.module().waits) == (before, before + 1)
    undo(target)


class Queue:
    """A stream that notes what it waits for."""

    def __init__(self, name):
        self.name, self.waited = name, []

    def record_event(self):
        return f"after {self.name}"

    def wait_event(self, event):
        self.waited.append(event)


def test_a_block_is_overwritten_after_all_streams_that_compute_with_it(monkeypatch):
    target = offload(model(), "cpu", device="sim")
    engine = next(enter.engine for enter in enters_of(target) if enter.engine is not None)
    mover, here, recorded = engine.mover, threading.local(), []
    monkeypatch.setattr(moving, "_record", lambda buffer, stream: recorded.append(stream))
    mover.module = SimpleNamespace(current_stream=lambda _: here.queue, stream=lambda _: nullcontext())
    mover.stream, here.queue, other = Queue("aside"), Queue("first"), Queue("second")
    group = next(each for each in engine.groups if not each.outer)

    def enter_and_leave():
        here.queue = other
        engine.enter(group)
        engine.leave(group)

    engine.enter(group)
    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    thread.join()
    engine.leave(group)
    mover.stream.waited.clear()
    mover._copy(group.slot, [], [])

    assert {*mover.stream.waited} == {"after first", "after second"}
    # The allocator knows of them too, for the time when the model is gone.
    assert {mover.stream, here.queue, other} == {*recorded}
    undo(target)


def test_the_device_holds_what_is_resident_and_two_blocks():
    target = model()
    memory = simulated.module().memory
    before = memory.allocated
    offload(target, "cpu", device="sim")
    largest = max(
        group.cargo.size for enter in enters_of(target) if enter.engine for group in enter.engine.groups
    )
    memory.peak = memory.allocated
    with torch.no_grad():
        target(ids())
    outer = sum(group.cargo.size for group in enters_of(target)[0].engine.groups if group.outer)
    activations = 40_000

    assert memory.peak - before <= outer + 2 * largest + activations


def test_memory_that_runs_out_names_the_block_and_releases(monkeypatch):
    target = offload(model(), "cpu", device="sim")
    fine = Mover.slot

    def full(self, size):
        raise torch.OutOfMemoryError("sim is full")

    monkeypatch.setattr(Mover, "slot", full)
    with torch.no_grad():
        with pytest.raises(torch.OutOfMemoryError, match="no memory on sim:0 for"):
            target(ids())
        monkeypatch.setattr(Mover, "slot", fine)
        torch.testing.assert_close(target(ids()), model()(ids()))


def test_a_plan_of_a_simulated_device_is_dispatched(want):
    target = model()
    places = plan(target, {"sim:0": "100kB", "cpu": "1GB"})
    dispatch(target, places)

    assert places.used["cpu"] > 0
    with torch.no_grad():
        torch.testing.assert_close(target(ids()), want)


def test_the_strategy_asks_the_devices_plugin_what_is_free(monkeypatch):
    gc.collect()  # models of other tests are no memory that is in use
    accelerator = Accelerator(device="sim", strategy="dispatched")
    size = sum(parameter.nbytes for parameter in model().parameters())
    memory = simulated.module().memory
    monkeypatch.setattr(memory, "total", memory.allocated + size // 2)
    target = accelerator.prepare(model())
    accelerator.end_training()

    assert {it.device.type for it in target.parameters()} == {"sim", "cpu"}
    assert enters_of(target)


def test_a_frozen_base_streams_while_an_adapter_trains_on_the_device(run_processes):
    # In a process of its own: torch's backward knows only devices that came before the first backward.
    ((streamed, resident),) = run_processes(gradients_of_adapters, world=1)

    torch.testing.assert_close(streamed, resident)


def gradients_of_adapters() -> list[torch.Tensor]:
    simulated.simulate()
    target, plain = model(), model()
    target.requires_grad_(False)
    plain.requires_grad_(False)
    offload(target, "cpu", device="sim")
    got = []
    for each, place in ((target, "sim"), (plain, "cpu")):
        torch.manual_seed(3)
        adapter = torch.nn.Linear(32, 32).to(place)
        each.blocks[0].register_forward_hook(
            lambda module, args, output, adapter=adapter: output + adapter(output)
        )
        each(ids()).square().mean().backward()
        got.append(adapter.weight.grad.cpu())
    return got


@pytest.mark.parametrize(
    "options", [{"device_map": {"": "cpu"}}, {"device_map": {"": "disk"}}, {"memory": {"cpu": "1GiB"}}]
)
def test_a_run_computes_on_its_device_what_has_places_on_the_host_only(options, want):
    plugins = [DispatchedPlugin(**options)]
    accelerator = Accelerator(device="sim", strategy="dispatched", plugins=plugins)
    base = model().requires_grad_(False)
    base.head = torch.nn.Sequential(base.head, torch.nn.Linear(base.head.out_features, 8))
    trained = base.head[1].weight
    target, _ = accelerator.prepare(base, torch.optim.SGD([trained], lr=0.1))
    seen = []
    target.blocks[1].register_forward_pre_hook(
        lambda module, args: seen.append((args[0].device.type, module.gain.device.type))
    )
    with torch.no_grad():
        target(ids().to("sim"))
    accelerator.end_training()

    assert seen == [("sim", "sim")]
    assert trained.device.type == "sim"
