"""A position taken at any batch of a run, the first and last of epochs too, against the run that went on."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reader_worlds import Numbers, Ragged, Stream, numbers, plain, prepared, real, world
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ConfigError, Topology, skip_first_batches
from accel_core.data.loader import prepare_loader

EPOCHS = 3
ONE_BATCH = {"kind": "map", "length": 2, "dispatch": False, "even": False, "moment": 0}


def ragged(length, drop_last):
    return lambda _: DataLoader(Numbers(length), batch_sampler=Ragged(length, drop_last), collate_fn=plain)


def stream(length, drop_last):
    return lambda _: DataLoader(Stream(length), 2, collate_fn=plain, drop_last=drop_last)


KINDS = {
    "map": lambda length, drop_last: numbers(length, 2, seed=9, drop_last=drop_last),
    "ragged": ragged,
    "iterable": stream,
    "stateful map": lambda length, drop_last: numbers(length, 2, seed=9, drop_last=drop_last),
    "stateful iterable": stream,
}


def loops(loaders, states=None):
    """The loops over what is left of `EPOCHS` epochs: for each, its rounds as (batches, remainder)."""
    found = []
    while loaders[0].epoch < EPOCHS:
        iterators, rounds = [yield_of(loader) for loader in loaders], []
        while True:
            batches = [next(each, None) for each in iterators]
            if all(batch is None for batch in batches):
                break
            rounds.append((batches, loaders[0].remainder, None))
            if states is not None:
                copies = [json.loads(json.dumps(each.state_dict(), default=repr)) for each in loaders]
                states.append((len(found), len(rounds), copies))
        found.append(rounds)
    return found


def yield_of(loader):
    yield from loader  # reader 0 begins, and draws, first


@st.composite
def cases(draw):
    readers = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(list(KINDS)))
    changes = draw(st.booleans()) and not kind.startswith("stateful")
    return {
        "kind": kind,
        "length": draw(st.integers(1, 17)),
        "drop_last": draw(st.booleans()),
        "readers": readers,
        "new_readers": draw(st.integers(1, 3)) if changes else readers,
        "dispatch": draw(st.booleans()),
        "even": draw(st.booleans()),
        "moment": draw(st.integers(0, 40)),
    }


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@settings(deadline=None, max_examples=150)
@example(case={**ONE_BATCH, "drop_last": True, "readers": 1, "new_readers": 2})
@given(case=cases())
def test_a_run_that_is_resumed_has_the_loops_that_the_other_has_left(case):
    if stateful := case["kind"].startswith("stateful"):
        pytest.importorskip("torchdata.stateful_dataloader")
    options = {
        "dispatch_batches": case["dispatch"],
        "even_batches": case["even"],
        "use_stateful_dataloader": stateful,
    }
    make = KINDS[case["kind"]](case["length"], case["drop_last"])
    old, states = prepared(make, case["readers"], **options), []
    expected = loops(old, states)
    if not states:
        return
    epoch, done, positions = states[case["moment"] % len(states)]

    new = prepared(make, case["new_readers"], **options)
    for number, loader in enumerate(new):
        same = case["readers"] == case["new_readers"]
        loader.load_state_dict(positions[number if same else 0])
    found = loops(new)
    left = [rounds for rounds in [expected[epoch][done:], *expected[epoch + 1 :]] if rounds]
    if case["readers"] == case["new_readers"]:
        assert [[batches for batches, _, _ in rounds] for rounds in found] == [
            [batches for batches, _, _ in rounds] for rounds in left
        ]
    elif not case["drop_last"]:
        assert [real(rounds) for rounds in found] == [real(rounds) for rounds in left]
    # Readers that cannot share one whole round have no batches in a whole epoch either.
    assert all(found) or not any(loops(prepared(make, case["new_readers"], **options)))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["iterable", "stateful iterable"])
@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_readers_that_may_run_out_apart_resume_with_the_loops_that_are_left(kind, length):
    if stateful := kind.startswith("stateful"):
        pytest.importorskip("torchdata.stateful_dataloader")
    options = {"dispatch_batches": False, "even_batches": False, "use_stateful_dataloader": stateful}
    make, states = KINDS[kind](length, False), []
    expected = loops(prepared(make, 2, **options), states)
    for epoch, done, positions in states:
        new = prepared(make, 2, **options)
        for loader, position in zip(new, positions, strict=True):
            loader.load_state_dict(position)
        left = [rounds for rounds in [expected[epoch][done:], *expected[epoch + 1 :]] if rounds]
        assert [[batches for batches, _, _ in rounds] for rounds in loops(new)] == [
            [batches for batches, _, _ in rounds] for rounds in left
        ]


@pytest.mark.parametrize("batches", [2, 3])
@pytest.mark.parametrize("first_skipped", [False, True])
def test_training_goes_on_from_each_step_of_an_epoch_as_if_nothing_had_happened(
    tmp_path, batches, first_skipped
):
    def train(resume, save=None):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = nn.Linear(1, 1).double()
        data = TensorDataset(torch.arange(2.0 * batches, dtype=torch.float64).reshape(-1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 2, shuffle=True))
        step = 0
        if resume is not None:
            accelerator.load_state(str(tmp_path / f"{resume}"))
            step = resume
        while loader.epoch < EPOCHS:
            for (x,) in skip_first_batches(loader, 1) if first_skipped and step == 0 else loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step += 1
                    if save is not None:
                        accelerator.save_state(str(tmp_path / f"{step}"))
        accelerator.end_training()
        return step, [parameter.item() for parameter in model.parameters()]

    expected = train(None, save=True)
    assert [train(step) for step in range(1, expected[0] + 1)] == [expected] * expected[0]


def test_the_length_of_a_loader_that_skips_is_that_of_what_it_gives():
    for loader in (prepared(numbers(12))[0], numbers(12)(0)):
        skipping = skip_first_batches(loader, 4)
        assert len(skipping) == len(list(skipping)) == 2
        assert len(skipping) == len(list(skipping)) == len(loader) == 6


def test_the_length_of_a_loader_that_skips_holds_inside_its_loop():
    for loader in (prepared(numbers(12))[0], numbers(12)(0)):
        skipping = skip_first_batches(loader, 4)
        assert [len(skipping) for _ in skipping] == [2, 2]


@pytest.mark.parametrize("number", [-1, 1.5, "2", None])
def test_what_is_no_number_of_batches_cannot_be_skipped(number):
    for loader in (prepared(numbers(12))[0], numbers(12)(0)):
        with pytest.raises(ConfigError, match="batches cannot be left out\ngive a whole number, 0 or more"):
            skip_first_batches(loader, number)


@pytest.mark.parametrize("epoch", [np.uint8(255), torch.tensor(255)], ids=repr)
def test_the_number_of_an_epoch_may_be_one_of_numpy_or_torch(epoch):
    (loader,) = prepared(numbers(4))
    loader.set_epoch(epoch)
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 255
    list(loader)
    assert loader.epoch == 256
    assert type(loader.epoch) is int


# -- the current iteration -----------------------------------------------------------------------


def test_a_second_iteration_inside_the_loop_leaves_the_loop_its_own_position():
    (loader,) = prepared(numbers(10))
    seen = []
    for batch in loader:
        assert next(iter(loader)) == [0, 1]
        seen.append((batch, loader.last, loader.state_dict()["consumed"], loader.epoch))
    assert [last for _, last, _, _ in seen] == [False] * 4 + [True]
    assert [(consumed, epoch) for _, _, consumed, epoch in seen] == [(2 * n, 0) for n in range(1, 6)]
    assert loader.epoch == 6


def test_a_window_closes_with_the_loader_that_a_second_iteration_reads_too():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(torch.ones(5, 1)))
    boundaries = []
    for _ in loader:
        next(iter(loader))
        with accelerator.accumulate(model):
            boundaries.append(accelerator.sync_gradients)
    accelerator.end_training()
    assert boundaries == [False, True, False, True, True]


OPS = st.sampled_from(["whole", "uneven", "view", "old view", "broken", "loaded"])


def history(ops, **options):
    """What reader 1 of 2 is given, and the epoch of its position, as the loader is used like this."""
    (run,) = world(data_seed=4, use_seedable_sampler=True)
    run.topology = Topology(reader=1, readers=2)
    loader = prepare_loader(numbers(9, 2, seed=4, **options)(0), run)
    old_view, found = skip_first_batches(loader, 1), []
    for op in ops:
        reader = {"view": skip_first_batches(loader, 2), "old view": old_view}.get(op, loader)
        with loader.padding(even=op not in ("uneven", "old view")):
            if op == "loaded":
                loader.load_state_dict(loader.state_dict())
            for batch in reader if op != "loaded" else ():
                found.append((batch, loader.last))
                if op == "broken":
                    break
        found.append(loader.state_dict()["epoch"])
    return found


def reference(ops):
    """The same, from the orders alone."""
    (alone,) = prepared(numbers(9, 1, seed=4), data_seed=4, use_seedable_sampler=True)
    orders = [[sample for batch in alone for sample in batch] for _ in range(len(ops) + 1)]
    epoch, done, planned, skips, found = 0, 0, True, 1, []
    for op in ops:
        if op == "loaded":
            planned = True
            if done == 3:
                epoch, done = epoch + 1, 0
        else:
            if not planned:
                epoch, done = epoch + 1, 0
            done = {"view": 2, "old view": skips}.get(op, 0) or done
            skips = 0 if op == "old view" else skips
            order = orders[epoch]
            share = [order[2:4], order[6:8], order[1:3]]
            share = share[: 2 if op in ("uneven", "old view") else 3]
            given = list(enumerate(share))[done:][: 1 if op == "broken" else None]
            found += [(batch, number == len(share) - 1) for number, batch in given]
            planned = op != "broken" or not given
            epoch, done = (epoch + 1, 0) if planned else (epoch, done + 1)
        found.append(epoch)
    return found


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
@settings(deadline=None, max_examples=30)
@given(ops=st.lists(OPS, min_size=1, max_size=5))
def test_every_way_to_begin_reads_the_iteration_that_was_begun(ops, options):
    assert history(ops, **options) == reference(ops)


def test_positions_are_of_the_cpus_generators_whatever_the_default_device_is():
    (loader,) = prepared(numbers(8, seed=3))
    state, expected = loader.state_dict(), list(loader)
    torch.set_default_device("meta")
    try:
        assert saved_again(loader, state) == state
    finally:
        torch.set_default_device(None)
    assert list(loader) == expected


def saved_again(loader, state):
    loader.load_state_dict(state)
    return loader.state_dict()
