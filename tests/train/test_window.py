"""Only core counts micro-batches; inside a window step, zero_grad, clip and schedulers do nothing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from training_problems import batches, net

from accel_core import AccelError, CheckpointError, GradientAccumulationPlugin


def boundaries(accelerator, count, loader_length=None):
    model = net()
    model, loader = accelerator.prepare(model, DataLoader(batches(count), batch_size=None))
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
    return seen


def test_every_nth_micro_batch_is_a_boundary(accelerator_of):
    assert boundaries(accelerator_of(gradient_accumulation_steps=2), 6) == [False, True] * 3


def test_the_loaders_end_ends_the_window(accelerator_of):
    assert boundaries(accelerator_of(gradient_accumulation_steps=4), 6) == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]


def steps_beside(accelerator, draw, epochs=1, beside=6, accumulate=None):
    """The optimizer steps of each epoch over 16 batches, while `draw` looks at another loader."""
    model, loader, other = accelerator.prepare(
        net(), DataLoader(batches(16), batch_size=None), DataLoader(batches(beside), batch_size=None)
    )
    drawing, steps = draw(other), [0] * epochs
    for epoch in range(epochs):
        for batch in loader:
            next(drawing)
            with accelerator.accumulate(model, batch=batch if accumulate else None):
                steps[epoch] += accelerator.sync_gradients
    return steps


def held(loader):
    """The batches of one iterator, and None after them."""
    yield from loader
    while True:
        yield None


def cycled(loader):
    while True:
        yield from loader


def not_drawn(loader):
    while True:
        yield None


@pytest.mark.parametrize("beside", [4, 6, 16, 21, 32])
@pytest.mark.parametrize("draw", [held, cycled, not_drawn])
def test_an_iterator_that_the_loop_draws_from_does_not_end_windows(accelerator_of, draw, beside):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    assert steps_beside(accelerator, draw, 3, beside) == [4, 4, 4]


@pytest.mark.parametrize("beside", [1, 6])
def test_the_window_of_a_batch_that_is_told_is_that_of_its_loader(accelerator_of, beside):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    assert steps_beside(accelerator, cycled, 2, beside, accumulate=True) == [4, 4]


def test_batches_of_a_held_iterator_end_its_windows_where_they_are_told(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, loader, other = accelerator.prepare(
        net(), DataLoader(batches(4), batch_size=None), DataLoader(batches(3), batch_size=None)
    )
    iterator, ends = iter(other), []
    for _ in loader:
        batch = next(iterator, None)
        with accelerator.accumulate(model, batch=batch):
            ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True, True]


def test_a_loop_inside_another_ends_windows_with_its_own_loader(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, outer, inner = accelerator.prepare(
        net(), DataLoader(batches(3), batch_size=None), DataLoader(batches(3), batch_size=None)
    )
    ends = []
    for _ in outer:
        for _ in inner:
            with accelerator.accumulate(model):
                ends.append(accelerator.sync_gradients)
    assert ends == [False, True, True] * 3


def test_a_validation_inside_a_window_leaves_its_end_to_the_training_loader(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model, train, validation = accelerator.prepare(
        net(), DataLoader(batches(6), batch_size=None), DataLoader(batches(2), batch_size=None)
    )
    ends = []
    for number, _ in enumerate(train):
        for _ in validation:
            if number % 2:
                break
        with accelerator.accumulate(model):
            ends.append(accelerator.sync_gradients)
    assert ends == [False] * 3 + [True, False, True]


PARTS = "accumulate was entered twice for a loader's last batch"


@pytest.mark.parametrize(("size", "told"), [(4, 1), (1, 0)])
def test_parts_of_a_loaders_last_batch_each_end_a_window_and_the_log_says_so_once(
    accelerator_of, size, told, caplog, monkeypatch
):
    monkeypatch.setattr("accel_core.distributed.logging._warned", set())
    accelerator = accelerator_of(gradient_accumulation_steps=size)
    model, loader = accelerator.prepare(net(), DataLoader(torch.zeros(12, 6), batch_size=4))
    steps = 0
    for batch in loader:
        for _ in batch:
            with accelerator.accumulate(model):
                steps += accelerator.sync_gradients
    assert steps == (12 if size == 1 else 2 + 4)
    assert caplog.text.count(PARTS) == told
    assert caplog.text.count("accelerator.windows(parts, model, size=...)") == told


def test_a_loader_of_one_batch_and_two_models_end_windows_without_a_word(accelerator_of, caplog):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    first, second, loader = accelerator.prepare(net(), net(), DataLoader(torch.zeros(4, 6), batch_size=4))
    for _ in range(3):
        for _ in loader:
            for model in (first, second):
                with accelerator.accumulate(model):
                    assert accelerator.sync_gradients
    assert PARTS not in caplog.text


def test_windows_count_the_parts_of_batches_themselves(accelerator_of):
    accelerator = accelerator_of()
    model, loader = accelerator.prepare(net(), DataLoader(torch.zeros(12, 6), batch_size=4))
    parts = (part for batch in loader for part in batch.split(1))
    assert [len([*window]) for window in accelerator.windows(parts, model, size=4)] == [4, 4, 4]


def test_the_loaders_end_can_be_ignored(accelerator_of):
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    seen = boundaries(accelerator_of(gradient_accumulation_plugin=plugin), 6)
    assert seen == [False, False, False, True, False, False]


def test_a_change_of_the_config_reaches_accumulate_at_once(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model, data = accelerator.prepare(net(), DataLoader(batches(6), batch_size=None))
    kept, seen = accelerator.accumulate(model), []
    for number, _ in enumerate(data):
        if number == 5:
            changed = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
            accelerator.run.reconfigure(accumulation=changed)
        with kept:
            seen.append(accelerator.sync_gradients)
    assert seen == [False, False, False, True, False, False]


@pytest.mark.parametrize(("adjust", "steps"), [(True, 3), (False, 10)])
def test_schedulers_step_once_a_window_or_each_micro_batch(accelerator_of, adjust, steps):
    plugin = GradientAccumulationPlugin(num_steps=4, adjust_scheduler=adjust)
    accelerator = accelerator_of(gradient_accumulation_plugin=plugin)
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    data = DataLoader(batches(10), batch_size=None)
    model, optimizer, scheduler, data = accelerator.prepare(
        model, optimizer, StepLR(optimizer, 1, gamma=0.5), data
    )
    for x, _ in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.5**steps]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_schedulers_can_be_left_to_the_user(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    with accelerator.accumulate(model):
        accelerator.backward(model(batches(1)[0][0]).sum())
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


@pytest.mark.parametrize("prepared", [True, False])
def test_a_scheduler_that_steps_in_the_loop_but_outside_accumulate_steps_once_a_window(
    accelerator_of, prepared
):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler, held_out = accelerator.prepare(
        model, optimizer, StepLR(optimizer, 1, gamma=0.5), DataLoader(batches(2), batch_size=None)
    )
    for x, _ in accelerator.prepare(DataLoader(batches(4), batch_size=None)) if prepared else batches(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        list(held_out)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_an_evaluation_loop_inside_does_not_end_the_window(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, train, evaluation = accelerator.prepare(
        net(), DataLoader(batches(4), batch_size=None), DataLoader(batches(3), batch_size=None)
    )
    seen = []
    for _ in train:
        for number, _ in enumerate(evaluation):
            if number == 1:
                break
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False, True]


def test_forward_only_computes_no_gradients(accelerator_of):
    accelerator = accelerator_of()
    model = accelerator.prepare(net())
    graphs = []

    def loss_of(model, x):
        outputs = model(x)
        graphs.append(outputs.requires_grad)
        return outputs.sum(), None

    for forward_only in (True, False):
        accelerator.forward_backward(
            model, [torch.ones(2, 6)], loss_of, microbatches=1, forward_only=forward_only
        )
    assert graphs == [False, True]


def test_forward_only_inside_a_window_leaves_it_alone(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    model, data, seen = accelerator.prepare(net()), batches(1), []
    for _ in range(6):
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)
        accelerator.forward_backward(
            model, data, lambda model, batch: (model(batch[0]).sum(), None), microbatches=1, forward_only=True
        )
    assert seen == [False, False, True] * 2


def test_the_end_of_the_inner_of_two_loaders_ends_the_window(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, outer, inner = accelerator.prepare(
        net(), DataLoader(batches(2), batch_size=None), DataLoader(batches(3), batch_size=None)
    )
    seen = []
    for _ in outer:
        for _ in inner:
            with accelerator.accumulate(model):
                seen.append(accelerator.sync_gradients)
    assert seen == [False, True, True] * 2


def test_windows_of_two_units_do_not_disturb_each_other(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    a, b = accelerator.prepare(net(0), net(1))
    seen = []
    for _ in range(4):
        for model in (a, b):
            with accelerator.accumulate(model):
                seen.append(accelerator.sync_gradients)
    assert seen == [False, False, True, True, False, False, True, True]


def test_accumulate_nests(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    a, b = accelerator.prepare(net(0), net(1))
    with accelerator.accumulate(a):
        with accelerator.accumulate(b):
            assert accelerator.run.accumulation.units == (accelerator.run.prepared.unit_of_model(b),)
        assert accelerator.run.accumulation.units == (accelerator.run.prepared.unit_of_model(a),)
    assert accelerator.run.accumulation is None


def test_step_zero_grad_clip_and_scheduler_do_nothing_inside_a_window(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    before = [p.clone() for p in model.parameters()]
    with accelerator.accumulate(model):
        accelerator.backward(model(batches(1)[0][0]).sum())
        gradients = [p.grad.clone() for p in model.parameters()]
        assert accelerator.clip_grad_norm_(model.parameters(), 1e-6) is None
        accelerator.clip_grad_value_(model.parameters(), 1e-6)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
    assert scheduler.get_last_lr() == [0.1]


@pytest.mark.parametrize("first", [True, False])
def test_zero_grad_may_stand_before_the_forward_or_after_the_step(accelerator_of, first):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = net()
    plain = SGD(reference.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(4)):
        with accelerator.accumulate(model):
            if first:
                optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            if not first:
                optimizer.zero_grad()
        (F.mse_loss(reference(x), y) / 2).backward()
        if number % 2:
            plain.step()
            plain.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_a_bad_batch_can_be_dropped_at_the_boundary(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for x, _ in batches(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_backward_outside_accumulate_divides_by_nothing(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    model(batches(1)[0][0]).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    accelerator.backward(model(batches(1)[0][0]).sum())
    assert all(torch.equal(g, p.grad) for g, p in zip(expected, model.parameters(), strict=True))


def test_clipping_parameters_of_no_unit_says_so(accelerator):
    with pytest.raises(AccelError, match="belong to no unit"):
        accelerator.clip_grad_norm_(net().parameters(), 1.0)
    with pytest.raises(AccelError, match="these 0 parameters"):  # of a generator that an optimizer has read
        accelerator.clip_grad_norm_(filter(None, []), 1.0)


def test_clipping_parameters_that_came_after_prepare_says_so(accelerator):
    model = accelerator.prepare(net())
    model.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(AccelError, match=r"belong to no unit, unit0.*\n.*prepare a changed model again"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)


@dataclass
class Record:
    """What cannot be hashed."""

    number: int


def test_accumulate_of_an_unprepared_model_says_so(accelerator):
    with pytest.raises(AccelError, match="has not prepared the Sequential"):
        accelerator.accumulate(net())
    with pytest.raises(AccelError, match="has not prepared the list"):
        accelerator.accumulate([net()])
    with pytest.raises(AccelError, match="has not prepared the Record"):
        accelerator.accumulate(Record(1))


def test_the_window_can_be_set_by_hand(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        accelerator.sync_gradients = True
        accelerator.backward(model(batches(1)[0][0]).sum())
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
    assert not torch.equal(before[0], next(model.parameters()))


def test_forward_backward_equals_the_loop(accelerator_of):
    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1]), len(batch[0])

    data = batches(3)
    reference = net()
    losses = [F.mse_loss(reference(x), y) for x, y in data]
    (sum(losses) / 3).backward()
    accelerator = accelerator_of()
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    output = accelerator.forward_backward(model, data, loss_of, microbatches=3)
    assert output.outputs == (8, 8, 8)
    torch.testing.assert_close(output.loss, sum(losses).detach() / 3)
    for ours, plain in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)
    optimizer.step()


def test_forward_backward_runs_the_model_that_it_is_given(accelerator_of):
    accelerator, models = accelerator_of(), [net(), net()]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    first, second, *_ = accelerator.prepare(*models, *optimizers)
    for given in (models[1], second):
        accelerator.forward_backward(given, batches(1), lambda model, batch: (model(batch[0]).sum(), None))
    assert all(parameter.grad is None for parameter in first.parameters())
    assert all(parameter.grad is not None for parameter in second.parameters())


def test_a_short_window_leaves_the_size_of_the_next_alone(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for given, found in [(1, 1), (None, 2)]:
        output = accelerator.forward_backward(
            model, batches(2), lambda model, batch: (model(batch[0]).sum(), None), microbatches=given
        )
        assert len(output.outputs) == found
        optimizer.step()
        optimizer.zero_grad()


def test_a_whole_window_of_too_few_batches_stops_as_next_does(accelerator):
    accelerator.prepare(net())
    with pytest.raises(StopIteration), accelerator.run.units[0].whole_window(iter(batches(1)), 2):
        pass


def one_weight(accelerator):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    return accelerator.prepare(model, SGD(model.parameters(), lr=1.0))


def backward_by_hand(accelerator, loss):
    (loss / accelerator.gradient_accumulation_steps).backward()


def backward_by_core(accelerator, loss):
    accelerator.backward(loss)


BACKWARDS = pytest.mark.parametrize("backward", [backward_by_hand, backward_by_core])


def weights_of_windows(accelerator, backward, act, gradients=(1.0, 10.0, 100.0, 1000.0)):
    """The weight after each micro-batch; its gradient is the number, before the division by 2."""
    model, optimizer = one_weight(accelerator)
    seen = []
    for number in gradients:
        with accelerator.accumulate(model):
            run = partial(lambda number: backward(accelerator, number * model(ONE).sum()), number)
            act(accelerator, optimizer, run)
        seen.append(model.weight.item())
    return seen


ONE = torch.ones(1, 1)


def last(accelerator, optimizer, run_backward):
    run_backward()
    optimizer.step()
    optimizer.zero_grad()


def first(accelerator, optimizer, run_backward):
    optimizer.zero_grad()
    run_backward()
    optimizer.step()


def guarded(accelerator, optimizer, run_backward):
    run_backward()
    if accelerator.sync_gradients:
        optimizer.step()
    optimizer.zero_grad()


@BACKWARDS
@pytest.mark.parametrize("act", [last, first, guarded])
def test_a_window_applies_all_its_gradients_whoever_computes_them(accelerator_of, backward, act):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    assert weights_of_windows(accelerator, backward, act) == [0.0, -5.5, -5.5, -555.5]


@BACKWARDS
def test_gradients_of_a_window_that_was_not_applied_are_cleared_by_the_next(accelerator_of, backward):
    def without_the_second_step(accelerator, optimizer, run_backward):
        optimizer.zero_grad()
        run_backward()
        if accelerator.window.number != 2:
            optimizer.step()

    accelerator = accelerator_of(gradient_accumulation_steps=2)
    seen = weights_of_windows(accelerator, backward, without_the_second_step)
    assert seen == [0.0, 0.0, 0.0, -550.0]


def test_gradients_that_are_there_before_the_first_window_belong_to_it(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    model(ONE).sum().backward()
    seen = []
    for _ in range(4):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(ONE).sum())
            optimizer.step()
        seen.append(model.weight.item())
    assert seen == [0.0, -2.0, -2.0, -3.0]


def test_an_optimizer_that_comes_after_some_windows_clears_each_of_its_own(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = accelerator.prepare(model)
    for _ in range(4):
        with accelerator.accumulate(model):
            pass
    optimizer = accelerator.prepare(SGD(model.parameters(), lr=1.0))
    seen = []
    for _ in range(6):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(ONE).sum())
            optimizer.step()
        seen.append(model.weight.item())
    assert seen == [0.0, -1.0, -1.0, -2.0, -2.0, -3.0]


def test_a_window_of_a_model_without_optimizer_is_a_mean_too(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    for number in (1.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward(number * model(ONE).sum())
    assert model.weight.grad.item() == 2.0


@BACKWARDS
def test_zero_grad_after_accumulate_drops_a_window(accelerator_of, backward):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    for _ in range(2):
        with accelerator.accumulate(model):
            backward(accelerator, model(ONE).sum())
        optimizer.zero_grad()
    assert model.weight.grad is None


def test_zero_grad_drops_a_window_at_its_boundary_where_clipping_finds_it_bad(accelerator_of):
    def clipped(accelerator, optimizer, run_backward):
        run_backward()
        norm = accelerator.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)
        if norm is not None and norm < 100:
            optimizer.step()
        optimizer.zero_grad()

    accelerator = accelerator_of(gradient_accumulation_steps=2)
    seen = weights_of_windows(accelerator, backward_by_hand, clipped, (1.0, 1000.0, 1.0, 10.0))
    assert seen == [0.0, 0.0, 0.0, -5.5]


@BACKWARDS
def test_zero_grad_instead_of_the_last_backward_drops_the_window(accelerator_of, backward):
    accelerator = accelerator_of(gradient_accumulation_steps=2)

    def skipping(accelerator, optimizer, run_backward):
        if (accelerator.window.number, accelerator.window.index) != (2, 1):
            last(accelerator, optimizer, run_backward)
        else:  # what programs do with a loss that is nan
            optimizer.zero_grad()

    assert weights_of_windows(accelerator, backward, skipping) == [0.0, 0.0, 0.0, -550.0]


def test_so_it_does_before_a_window_that_is_run_as_a_whole(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(ONE).sum())
    with accelerator.accumulate(model):
        optimizer.zero_grad()
    accelerator.forward_backward(model, [ONE, ONE], lambda model, batch: (model(batch).sum(), None))
    optimizer.step()
    assert model.weight.item() == -1.0


def test_after_a_window_that_was_dropped_so_a_save_finds_no_gradients(accelerator_of, tmp_path):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(ONE).sum())
    with accelerator.accumulate(model):
        optimizer.zero_grad()
        with pytest.raises(CheckpointError, match="gradients that no optimizer has applied"):
            accelerator.save_state(tmp_path / "before the forward")
    accelerator.save_state(tmp_path / "state")


@BACKWARDS
@pytest.mark.parametrize("evaluates", [False, True])
def test_zero_grad_before_the_last_forward_leaves_the_window_to_a_step_outside(
    accelerator_of, backward, evaluates
):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    seen = []
    for number in (1.0, 10.0, 100.0, 1000.0):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            if evaluates:
                loss_of = lambda model, batch: (model(batch).sum(), None)  # noqa: E731
                accelerator.forward_backward(model, [ONE, ONE], loss_of, forward_only=True)
            backward(accelerator, number * model(ONE).sum())
        optimizer.step()
        seen.append(model.weight.item())
    assert seen == [0.0, -5.5, -5.5, -555.5]


@pytest.mark.parametrize(
    ("backward", "steps"), [(backward_by_core, False), (backward_by_core, True), (backward_by_hand, True)]
)
def test_zero_grad_before_the_last_forward_alone_clears_nothing(accelerator_of, backward, steps):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    for number in (1.0, 10.0, 100.0, 1000.0):
        with accelerator.accumulate(model):
            if number == 10.0:
                optimizer.zero_grad()
            backward(accelerator, number * model(ONE).sum())
        if number == 1000.0 or steps:
            optimizer.step()
    # The gradients of the first window are 5.5, and stay: a step clears nothing.
    assert model.weight.item() == (-5.5 - 555.5 if steps else -555.5)


def test_what_comes_after_a_load_is_not_cleared_by_what_came_before(accelerator_of, tmp_path):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    accelerator.save_state(tmp_path / "begin")
    for _ in range(2):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
    accelerator.load_state(tmp_path / "begin")
    model(ONE).sum().backward()
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(ONE).sum())
            optimizer.step()
    assert model.weight.item() == -2.0


def test_both_optimizers_of_a_unit_clear_before_the_forward(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    model, a, b = accelerator.prepare(model, *(SGD(model[at].parameters(), lr=0.0) for at in (0, 2)))
    x = batches(1)[0][0]
    for _ in range(4):
        with accelerator.accumulate(model):
            a.zero_grad()
            b.zero_grad()
            accelerator.backward(model(x).sum())
            a.step()
            b.step()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_window_that_is_ended_by_hand_is_that_of_the_innermost_accumulate_alone(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    (generator, _), (critic, step_critic) = one_weight(accelerator), one_weight(accelerator)
    for number in range(8):
        with accelerator.accumulate(critic):
            accelerator.backward(10.0**number * critic(ONE).sum())
            step_critic.step()
            step_critic.zero_grad()
        with accelerator.accumulate(generator):
            if number == 1:
                accelerator.sync_gradients = True
    assert critic.weight.item() == -2777777.75


def test_the_outer_window_is_the_current_one_again_after_the_inner(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    (outer, _), (inner, _) = one_weight(accelerator), one_weight(accelerator)
    with accelerator.accumulate(outer):
        for _ in range(2):
            with accelerator.accumulate(inner):
                pass
        assert not accelerator.sync_gradients


@pytest.mark.parametrize(
    ("size", "after", "seen"), [(8, 1, [4, 12]), (1, 2, [4, 5, 6, 7]), (2, 4, [4, 6, 8])]
)
def test_a_size_set_within_a_window_holds_from_the_next_one_on(accelerator_of, size, after, seen):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model, optimizer = one_weight(accelerator)
    found = []
    for number in range(1, seen[-1] + 1):
        with accelerator.accumulate(model):
            if number == after:
                accelerator.gradient_accumulation_steps = size
            accelerator.backward(model(ONE).sum())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                found.append(number)
                assert model.weight.item() == -len(found)
    assert found == seen


@pytest.mark.parametrize("both", [True, False])
def test_accumulate_within_that_of_the_same_models_is_refused(accelerator_of, both):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = accelerator.prepare(net())
    inner = accelerator.accumulate(*([] if both else [model]))
    with (
        pytest.raises(AccelError, match="inside that of the same models(.|\n)*once per micro"),
        accelerator.accumulate(model),
        inner,
    ):
        pass
    assert accelerator.run.accumulation is None


def test_a_micro_batch_that_raises_counts_in_its_window(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    with pytest.raises(ZeroDivisionError), accelerator.accumulate(model):
        1 / 0  # noqa: B018
    with accelerator.accumulate(model):
        assert accelerator.sync_gradients
        accelerator.backward(model(ONE).sum())
        optimizer.step()
    assert model.weight.item() == -0.5


def test_forward_backward_drops_batches_that_do_not_fill_a_window(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)
    for _ in range(2):
        data = iter([1.0, 1.0, 100.0])
        run = partial(
            accelerator.forward_backward, model, data, lambda model, x: (x * model(ONE).sum(), None)
        )
        run()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(StopIteration):
            run()
        assert model.weight.grad is None
    assert model.weight.item() == -2.0


def test_a_forward_backward_that_fails_leaves_the_window_as_it_was(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, _ = one_weight(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(ONE).sum())
    before = accelerator.window.snapshot()
    with pytest.raises(ZeroDivisionError):
        accelerator.forward_backward(model, [1, 2], lambda *_: 1 / 0)
    assert accelerator.window.snapshot() == before


@pytest.mark.parametrize(
    "use",
    ["forward_backward", "clip_grad_norm_", "clip_grad_value_", "step", "split_between_processes", "save"],
)
def test_an_ended_run_refuses_to_train(accelerator_of, use):
    accelerator = accelerator_of()
    model, optimizer = one_weight(accelerator)
    accelerator.end_training()
    uses = {
        "forward_backward": lambda: accelerator.forward_backward(model, [ONE], lambda *_: None),
        "clip_grad_norm_": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "clip_grad_value_": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        "step": optimizer.step,
        "split_between_processes": lambda: accelerator.split_between_processes([1]),
        "save": lambda: accelerator.save({}, "nowhere"),
    }
    with pytest.raises(AccelError, match="this run has ended"):
        uses[use]()


def test_a_closure_in_a_window_of_several_micro_batches_is_refused(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = one_weight(accelerator)

    def closure():
        optimizer.zero_grad()
        loss = model(ONE).sum()
        accelerator.backward(loss)
        return loss

    before = model.weight.item()
    for _ in range(2):
        with accelerator.accumulate(model), pytest.raises(AccelError, match="this window has 2"):
            optimizer.step(closure)
    assert model.weight.item() == before


def test_a_closure_is_taken_where_each_window_is_one_micro_batch(accelerator_of):
    def trained(model, optimizer, backward, context):
        def loss_of(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            backward(loss)
            return loss

        for batch in batches(3):
            with context(model):
                optimizer.step(partial(loss_of, *batch))
        return list(model.parameters())

    plain, model = net(), net()
    expected = trained(plain, LBFGS(plain.parameters()), torch.Tensor.backward, nullcontext)
    accelerator = accelerator_of()
    prepared = accelerator.prepare(model, LBFGS(model.parameters()))
    found = trained(*prepared, accelerator.backward, accelerator.accumulate)
    assert all(map(torch.equal, found, expected))


def test_an_optimizer_takes_what_was_added_to_its_model_and_nothing_else(accelerator):
    model = nn.Linear(1, 1)
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    model, optimizer = accelerator.prepare(model, SGD(groups, lr=1.0))
    with pytest.raises(AccelError, match="was not in its models when they were prepared"):
        optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
    assert list(map(id, optimizer.param_groups)) == list(map(id, groups))
    model.scale = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [model.scale]})
    accelerator.backward((model(ONE) + model.scale).sum())
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    assert model.scale.item() != 1


def trainer(lr=0.1):
    model = net()
    return model, SGD(model.parameters(), lr=lr)


def train_in(context, accelerator, pairs, batch):
    x, y = batch
    with context:
        accelerator.backward(sum(F.mse_loss(model(x), y) for model, _ in pairs))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()


def windows_by_hand(all_batches, size=2):
    model, optimizer = trainer()
    for number, (x, y) in enumerate(all_batches, start=1):
        (F.mse_loss(model(x), y) / size).backward()
        if number % size == 0:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def test_a_context_that_is_kept_follows_what_is_prepared_later(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    first = accelerator.prepare(*trainer())
    of_all = accelerator.accumulate()
    train_in(of_all, accelerator, [first], batches(1)[0])
    train_in(of_all, accelerator, [first], batches(1)[0])
    second = accelerator.prepare(*trainer())
    for batch in batches(4):
        train_in(of_all, accelerator, [first, second], batch)
    for ours, plain in zip(second[0].parameters(), windows_by_hand(batches(4)), strict=True):
        assert torch.equal(ours, plain)


def test_a_context_that_is_kept_ends_with_its_models(accelerator_of):
    accelerator = accelerator_of()
    model, _ = accelerator.prepare(*trainer())
    of_it = accelerator.accumulate(model)
    accelerator.free_memory()
    with pytest.raises(AccelError, match="has not prepared the"), of_it:
        pass


def test_no_micro_batch_begins_after_the_run_has_ended(accelerator_of):
    accelerator = accelerator_of()
    model, _ = accelerator.prepare(*trainer())
    with accelerator.accumulate(model):
        pass
    accelerator.end_training()
    with pytest.raises(AccelError, match="has ended"), accelerator.accumulate(model):
        pass
