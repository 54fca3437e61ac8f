"""Losses that are sums over items are divided by the items of the whole window: exact for any lengths."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import token_losses
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from training_problems import batches, net

from accel_core import AccelError, GradScalerKwargs
from accel_core.training.step import _items_of_all_ranks


def assert_near(ours, plain, **tolerance):
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_window_of_ragged_batches_equals_the_whole_batch(accelerator_of, accumulate, clip):
    accelerator = accelerator_of(gradient_accumulation_steps=accumulate)
    assert_near(token_losses.ours(accelerator, clip), token_losses.plain(clip))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_so_does_one_that_is_run_as_a_whole(accelerator_of, clip):
    weights, losses = token_losses.by_windows(accelerator_of(gradient_accumulation_steps=4), clip)
    assert_near(weights, token_losses.plain(clip))
    if clip is None:
        assert losses == pytest.approx(token_losses.plain_losses())


def test_an_evaluation_in_between_leaves_a_windows_items_alone(accelerator_of):
    accelerator = accelerator_of()
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    batch = batches(1)[0]

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), None

    accelerator.forward_backward(model, [batch], loss_of, items=batch[1].numel())
    accelerator.forward_backward(model, [batch], loss_of, forward_only=True, items=1)
    optimizer.step()
    reference = net()
    F.mse_loss(reference(batch[0]), batch[1]).backward()
    SGD(reference.parameters(), lr=0.1).step()
    assert_near(model.parameters(), reference.parameters())


def test_an_evaluation_that_counts_items_leaves_a_window_of_means_alone(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    data = batches(2)
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.forward_backward(
                model,
                [x],
                lambda model, x: (model(x).sum(), None),
                microbatches=1,
                forward_only=True,
                items=len(x),
            )
            (F.mse_loss(model(x), y) / 2).backward()
            optimizer.step()
    reference = net()
    (sum(F.mse_loss(reference(x), y) for x, y in data) / 2).backward()
    SGD(reference.parameters(), lr=0.1).step()
    assert_near(model.parameters(), reference.parameters())


NO_NUMBERS = [-1, float("nan"), float("inf"), "3", [3], 1j, True]
NO_NUMBERS += [torch.tensor(-2.0), torch.tensor(torch.nan), torch.ones(2)]


@pytest.mark.parametrize("items", NO_NUMBERS, ids=str)
def test_items_that_are_no_number_of_items_are_refused(accelerator, items):
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(AccelError, match="0 or more"):
        accelerator.accumulate(model, items=items)
    with pytest.raises(AccelError, match="0 or more"):
        accelerator.forward_backward(model, [], token_losses.ours, items=items)


def test_items_may_be_a_plain_number(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    assert_near(token_losses.ours(accelerator, as_tensor=False), token_losses.plain())


def test_the_next_items_may_be_written_into_the_same_tensor(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    found, count = [], torch.zeros(())
    for one_tensor in (True, False):
        model = net()
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
        for size, (x, y) in zip((3, 8, 5, 1), batches(4), strict=True):
            items = count.fill_(size) if one_tensor else torch.tensor(float(size))
            with accelerator.accumulate(model, items=items):
                accelerator.backward(F.mse_loss(model(x[:size]), y[:size], reduction="sum"))
                count.fill_(-1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
        count = torch.zeros(())
    assert_near(*found, rtol=0, atol=0)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_loss_scale_changes_nothing(accelerator_of, clip):
    scale = GradScalerKwargs(init_scale=32.0)
    accelerator = accelerator_of(
        gradient_accumulation_steps=4, mixed_precision="fp16", kwargs_handlers=[scale]
    )
    assert_near(token_losses.ours(accelerator, clip), token_losses.plain(clip), rtol=2e-2, atol=2e-2)


def test_a_window_without_any_item_keeps_the_gradients_zero(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    lengths = [0] * token_losses.GLOBAL + token_losses.LENGTHS[: token_losses.GLOBAL]
    assert_near(token_losses.ours(accelerator, lengths=lengths), token_losses.plain(lengths=lengths))


def test_a_short_last_window_is_a_mean_of_what_it_has(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model = net()
    data = torch.utils.data.DataLoader(batches(6), batch_size=None)
    model, optimizer, data = accelerator.prepare(model, SGD(model.parameters(), lr=0.1), data)
    reference = net()
    plain = SGD(reference.parameters(), lr=0.1)
    for x, y in data:
        with accelerator.accumulate(model, items=1):
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    for window in (batches(6)[:4], batches(6)[4:]):
        (sum(F.mse_loss(reference(x), y) for x, y in window) / len(window)).backward()
        plain.step()
        plain.zero_grad()
    assert_near(model.parameters(), reference.parameters())


def test_several_losses_of_a_micro_batch_share_its_items(accelerator):
    model = net()
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    with accelerator.accumulate(model, items=len(x)):
        for _ in range(2):
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
        accelerator.unscale_gradients()
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    (2 * F.mse_loss(model(x), y)).backward()
    assert_near(ours, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("early", ["clip_grad_norm_", "clip_grad_value_", "unscale_gradients"])
def test_gradients_are_divided_once_where_another_model_has_its_loss_later(accelerator_of, early):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    models = [net(0), net(1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    x, y = batches(1)[0]
    for _ in range(2):
        with accelerator.accumulate(*models, items=len(x)):
            accelerator.backward(F.mse_loss(models[0](x), y, reduction="sum"))
            edit = getattr(accelerator, early)
            edit(optimizers[0]) if early == "unscale_gradients" else edit(models[0].parameters(), 1e9)
            accelerator.backward(F.mse_loss(models[1](x), y, reduction="sum"))
            accelerator.unscale_gradients()
    for number, model in enumerate(models):
        reference = net(number)
        F.mse_loss(reference(x), y).backward()
        assert_near([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_a_backward_onto_gradients_that_are_divided_already_is_refused(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    x, y = batches(1)[0]
    with accelerator.accumulate(model, items=len(x)):
        accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        with pytest.raises(AccelError, match="before you clip, unscale or step"):
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
        with pytest.raises(AccelError, match="before you clip, unscale or step"):
            optimizer.step()  # by what is mixed now
    optimizer.zero_grad()
    for _ in range(2):
        with accelerator.accumulate(model, items=len(x)):
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            model.zero_grad()  # the step is left out


def test_items_of_a_unit_do_not_touch_another(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    a, b = net(0), net(1)
    a, b, opt_a, opt_b = accelerator.prepare(a, b, SGD(a.parameters(), lr=0.1), SGD(b.parameters(), lr=0.1))
    x, y = batches(1)[0]
    for _ in range(2):
        with accelerator.accumulate(a, items=len(x)):
            accelerator.backward(F.mse_loss(a(x), y, reduction="sum"))
        with accelerator.accumulate(b):
            accelerator.backward(F.mse_loss(b(x), y))
    for optimizer, model in ((opt_a, a), (opt_b, b)):
        reference = net(0 if model is a else 1)
        F.mse_loss(reference(x), y).backward()
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        assert_near([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
        optimizer.step()


def test_a_backward_outside_accumulate_forgets_the_items_of_the_last_window(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.0))
    x, y = batches(1)[0]
    with accelerator.accumulate(model, items=len(x)):
        accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.backward(F.mse_loss(model(x), y))
    accelerator.clip_grad_norm_(model.parameters(), 1e9)
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    assert_near(ours, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("items", [(3, None), (None, 3)])
def test_items_of_some_micro_batches_only_are_refused(accelerator_of, items):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(2, 1))
    with accelerator.accumulate(model, items=items[0]):
        pass
    with (
        pytest.raises(AccelError, match=r"some micro-batches of a window.*\n.*0 where there are none"),
        accelerator.accumulate(model, items=items[1]),
    ):
        pass


def decayed(model):
    for p in model.parameters():
        p.grad.add_(p, alpha=0.1)


def clipped_by_hand(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replaced(model):
    for p in model.parameters():
        p.grad = p.grad + 0.1 * p.detach()


@pytest.mark.parametrize("edit", [decayed, clipped_by_hand, replaced])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_gradients_are_divided_before_they_are_changed_or_that_is_refused(
    accelerator_of, edit, divided, whole
):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    x, y = batches(1)[0]

    def finish():
        if divided:
            accelerator.unscale_gradients()
        edit(model)
        optimizer.step()

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum"), None

    def train():
        if whole:
            accelerator.forward_backward(model, [(x, y)] * 2, loss_of, items=2 * y.numel())
            finish()
            return
        for last in (False, True):
            with accelerator.accumulate(model, items=y.numel()):
                accelerator.backward(loss_of(model, (x, y))[0])
                if last:
                    finish()

    if not divided:
        for go_on in (train, optimizer.step):  # what is refused once is not taken later
            with pytest.raises(AccelError, match=r"changed after backward.*\n.*unscale_gradients\(\)"):
                go_on()
        return
    train()
    reference = net()
    F.mse_loss(reference(x), y).backward()
    edit(reference)
    SGD(reference.parameters(), lr=0.1).step()
    assert_near(model.parameters(), reference.parameters())


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_that_are_cleared_before_the_step_are_no_edit(accelerator, set_to_none):
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    for x, y in batches(2):  # each is one to leave out
        with accelerator.accumulate(model, items=len(x)):
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
            optimizer.zero_grad(set_to_none)
            optimizer.step()
    assert_near(model.parameters(), before)


def test_gradients_that_the_model_drops_are_no_edit_then_or_in_a_later_window(accelerator):
    model, reference = net(), net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for steps, (x, y) in zip((True, False), batches(2), strict=True):
        with accelerator.accumulate(model, items=y.numel()):
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
            model.zero_grad()
            if steps:
                optimizer.step()
    with accelerator.accumulate(model, items=y.numel()):
        F.mse_loss(model(x), y, reduction="sum").backward()
        optimizer.step()
    F.mse_loss(reference(x), y).backward()
    SGD(reference.parameters(), lr=0.1).step()
    assert_near(model.parameters(), reference.parameters())


def test_gradients_that_are_applied_are_not_divided_again(accelerator):
    model, reference = net(), net()
    parts = [[*each.parameters()] for each in model.children() if [*each.parameters()]]
    model, first, second = accelerator.prepare(model, SGD(parts[0], lr=0.1), SGD(parts[-1], lr=0.1))
    assert len(parts) > 1
    ((x, y),) = batches(1)
    with accelerator.accumulate(model, items=y.numel()):
        accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
        first.step()
        with pytest.raises(AccelError, match=r"divided by the items.* and applied.*\n.*step\(\) once"):
            first.step()
        second.step()
        with pytest.raises(AccelError, match=r"divided by the items.* and applied.*\n.*step\(\) once"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    F.mse_loss(reference(x), y).backward()
    SGD(reference.parameters(), lr=0.1).step()
    assert_near(model.parameters(), reference.parameters())


def test_a_closure_is_refused_where_items_are_counted(accelerator):
    """Its gradients were applied as sums."""
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    ((x, y),) = batches(1)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y, reduction="sum")
        accelerator.backward(loss)
        return loss

    refused = pytest.raises(AccelError, match=r"nothing divides by the items.*\n.*divide the loss")
    with accelerator.accumulate(model, items=y.numel()), refused:
        optimizer.step(closure)
    optimizer.zero_grad()
    with accelerator.accumulate(model):
        optimizer.step(closure)


def divided_where_gradients_are() -> list[float]:
    from accel_core.defaults.base import Base
    from accel_testing.simulated.device import simulate

    simulate("sim")
    offloaded, resident = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="sim"))
    for each in (offloaded, resident):
        each.grad = torch.ones_like(each)
    unit = SimpleNamespace(named_parameters=lambda: {"offloaded": offloaded, "resident": resident})
    base = Base(SimpleNamespace(topology=SimpleNamespace(losses=1)))
    base.reduce_gradients(unit, torch.tensor(4.0, device="sim"))
    return [each.grad.cpu()[0].item() for each in (offloaded, resident)]


@pytest.mark.simulated
def test_gradients_that_are_offloaded_are_divided_too(run_processes):
    assert run_processes(divided_where_gradients_are, world=1) == [[0.25, 0.25]]


def test_more_items_than_float32_counts_are_counted_exactly(accelerator_of):
    accelerator = accelerator_of()
    accelerator.prepare(net())
    for items in (2**24 + 1, torch.tensor(2**24 + 1)):
        assert _items_of_all_ranks(accelerator.run.units[0], items).item() == 2**24 + 1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    "items",
    [
        torch.tensor(200, dtype=torch.uint8),
        torch.tensor(100, dtype=torch.int8),
        torch.tensor(30000.0, dtype=torch.float16),
        torch.tensor(131.0, dtype=torch.bfloat16),
        torch.tensor(True),
        np.uint8(200),
    ],
    ids=repr,
)
def test_items_of_a_narrow_dtype_add_up_to_more_than_it_holds(accelerator_of, items, whole):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        with accelerator.accumulate(model, items=items):
            accelerator.backward(model(torch.ones(1, 1, dtype=torch.float64)).sum())
    with accelerator.accumulate(model, items=4 if whole else items):
        accelerator.backward(model(torch.ones(1, 1, dtype=torch.float64)).sum())
        accelerator.unscale_gradients()
    assert model.weight.grad.item() == pytest.approx(4 / (3 * float(items) + (4 if whole else float(items))))


def test_items_are_counted_without_float64_on_a_chip_that_lacks_it():
    run = SimpleNamespace(
        device=torch.device("cpu"),
        stack=SimpleNamespace(device=SimpleNamespace(card=SimpleNamespace(offers={"float64"}))),
        topology=SimpleNamespace(losses=2),
        mark_step=None,
        collectives=lambda _: SimpleNamespace(all_reduce=lambda count, how: count),
    )
    hooks = SimpleNamespace(capabilities=lambda _: frozenset())  # less than the card: an Arc of Intel
    unit = SimpleNamespace(run=run, hooks=hooks, step_state=SimpleNamespace(items=None))
    total = _items_of_all_ranks(unit, 3.0)
    assert (total.dtype, total.item()) == (torch.float32, 6.0)


def test_a_refused_micro_batch_leaves_the_windows_in_use_as_they_were(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    one, other = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    with accelerator.accumulate(other):
        pass
    for _ in range(3):
        with accelerator.accumulate(one):
            pass
    before = accelerator.window.index, accelerator.sync_gradients
    with pytest.raises(AccelError), accelerator.accumulate(other, items=2):
        pass
    assert (accelerator.window.index, accelerator.sync_gradients) == before == (2, True)
    accelerator.end_training()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("apply", [None, "step", "zero_grad"])
def test_a_window_that_is_ended_outside_is_applied_or_that_is_refused(accelerator_of, by_hand, apply):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, reference = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    reference.load_state_dict(model.state_dict())
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
    plain = SGD(reference.parameters(), lr=1.0)

    def train(x):
        with accelerator.accumulate(model, items=len(x)):
            loss = model(x).sum()
            loss.backward() if by_hand else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def train_plainly(x):
        plain.zero_grad()
        reference(x).mean().backward()
        plain.step()

    first, last = torch.rand(3, 1), torch.rand(4, 1)
    train(first)
    accelerator.sync_gradients = True
    if apply is None:
        train(last[:2])
        with pytest.raises(AccelError, match=r"of an earlier window.*\n.*optimizer\.zero_grad\(\)"):
            train(last[2:])
        return
    if apply == "step":
        optimizer.step()
        train_plainly(first)
    optimizer.zero_grad()
    train(last[:2])
    train(last[2:])
    train_plainly(last)
    assert_near(model.parameters(), reference.parameters())


def test_a_window_after_one_that_was_clipped_and_cleared_by_hand_is_divided_too(accelerator):
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    for steps in (False, True):
        with accelerator.accumulate(model, items=4):
            model(torch.ones(4, 1)).sum().backward()
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            if steps:
                optimizer.step()
            model.zero_grad()
    assert_near([model.weight], [before - 1])


@pytest.mark.parametrize("items", [None, 1])
def test_gradients_that_a_window_has_left_join_no_window_that_counts_items(accelerator_of, items):
    accelerator = accelerator_of()
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
    for count, steps in ((items, False), (1, True)):
        with accelerator.accumulate(model, items=count):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            if steps:
                with pytest.raises(AccelError, match="an earlier window were not cleared"):
                    optimizer.step()


def test_an_optimizer_that_steps_later_may_have_had_no_gradients_before(accelerator_of):
    accelerator = accelerator_of()
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    optimizers = [SGD(part.parameters(), lr=1.0) for part in model]
    model, first, second = accelerator.prepare(model, *optimizers)
    for trained in ((first,), (first,), (first, second)):
        model[1].requires_grad_(second in trained)
        with accelerator.accumulate(model, items=1):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            for optimizer in trained:
                optimizer.step()
                optimizer.zero_grad()
    assert second.param_groups[0]["params"][0].grad is None


def test_each_context_has_the_items_that_it_was_made_with(accelerator_of):
    accelerator = accelerator_of()
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    made = [accelerator.accumulate(model, items=items) for items in (2, 10)]
    reference = net()
    for context, (x, y), items in zip(made, batches(2), (2, 10), strict=True):
        with context:
            accelerator.accumulate(model)  # that only looks
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
            optimizer.step()
            optimizer.zero_grad()
        reference.zero_grad()
        (F.mse_loss(reference(x), y, reduction="sum") / items).backward()
        SGD(reference.parameters(), lr=0.1).step()
    assert_near(model.parameters(), reference.parameters())


@pytest.mark.parametrize("divided", [True, False])
def test_an_optimizer_that_was_not_prepared_steps_no_sums(accelerator, divided):
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    optimizer = SGD(model.parameters(), lr=1.0)
    before = model.weight.item()
    with accelerator.accumulate(model, items=4):
        accelerator.backward(model(torch.ones(4, 1)).sum())
    if divided:
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        assert model.weight.item() == pytest.approx(before - 1.0)
    else:
        with pytest.raises(AccelError, match=r"divides its gradients when .*\nprepare the optimizer"):
            optimizer.step()
        assert model.weight.item() == before


@pytest.mark.parametrize("divided", [True, False])
def test_one_of_two_optimizers_that_was_not_prepared_steps_no_sums(accelerator, divided):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    own = SGD(model[1].parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, SGD(model[0].parameters(), lr=1.0))
    with accelerator.accumulate(model, items=4):
        accelerator.backward(model(torch.ones(4, 1)).sum())
    if divided:
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    with nullcontext() if divided else pytest.raises(AccelError, match="holds, and accumulate"):
        own.step()
    optimizer.step()
    assert [layer.weight.item() for layer in model] == pytest.approx([0.0, 0.0 if divided else 1.0])


@pytest.mark.parametrize("clears_before", [True, False])
def test_gradients_that_are_edited_after_the_division_are_not_divided_again(accelerator, clears_before):
    """Several optimizers, and the loss's own backward: nothing but the gradients tells of one more."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer in model:
        nn.init.ones_(layer.weight)
    model, *optimizers = accelerator.prepare(model, *(SGD(layer.parameters(), lr=1.0) for layer in model))
    with accelerator.accumulate(model, items=4):
        for optimizer in optimizers if clears_before else ():
            optimizer.zero_grad()
        model(torch.ones(4, 1)).sum().backward()
        accelerator.unscale_gradients()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        for optimizer in optimizers:
            optimizer.step()
    assert [layer.weight.item() for layer in model] == [0.5, 0.5]


@pytest.mark.parametrize("is_new", [True, False], ids=["another backward", "replaced"])
def test_gradients_that_may_be_divided_or_not_are_refused(accelerator, is_new):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model, first, second = accelerator.prepare(model, *(SGD(layer.parameters(), lr=0.5) for layer in model))
    with accelerator.accumulate(model, items=4):
        model(torch.ones(4, 1)).sum().backward()
        first.step()
        if is_new:
            model.zero_grad()
            model(torch.ones(4, 1)).sum().backward()
        else:
            model[1].weight.grad = model[1].weight.grad * 0.5
        with pytest.raises(AccelError, match="nothing tells whether"):
            second.step()


def test_a_gradient_that_is_dropped_after_the_division_leaves_others_divided(accelerator):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model, *optimizers = accelerator.prepare(model, *(SGD(layer.parameters(), lr=1.0) for layer in model))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    with accelerator.accumulate(model, items=4):
        model(torch.ones(4, 1)).sum().backward()
        accelerator.unscale_gradients()
        model[1].bias.grad = None
        optimizers[1].step()
    assert [model[1].weight.item(), model[1].bias.item()] == [-1.0, 1.0]


ZEROED = {
    None: lambda model, optimizer: None,
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


def windows_of_kinds(accelerator, kinds, stepped, zero):
    """Train one window per kind; the last one is applied. Return the weights."""
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    for number, (kind, (x, y)) in enumerate(zip(kinds, batches(len(kinds)), strict=True)):
        summed = {"items": y.numel()} if kind == "items" else {}
        with nullcontext() if kind == "outside" else accelerator.accumulate(model, **summed):
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum" if summed else "mean"))
        if stepped or number == len(kinds) - 1:
            optimizer.step()
        ZEROED[zero](model, optimizer)
    return list(model.parameters())


def plain_windows(count, stepped):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(count)):
        F.mse_loss(model(x), y).backward()
        if stepped or number == count - 1:
            optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


KINDS = [("items", "items"), ("means", "items"), ("outside", "items"), ("items", "outside")]


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("kinds", [*KINDS, ("items", "means")], ids="-".join)
@pytest.mark.parametrize("zero", [zero for zero in ZEROED if zero], ids=str)
def test_gradients_of_an_earlier_window_may_be_cleared_in_any_way(accelerator, kinds, stepped, zero):
    assert_near(windows_of_kinds(accelerator, kinds, stepped, zero), plain_windows(2, stepped))


@pytest.mark.parametrize(
    ("kinds", "stepped"), [(kinds, False) for kinds in KINDS] + [(("items", "items"), True)]
)
def test_gradients_that_stay_from_an_earlier_window_are_refused(accelerator, kinds, stepped):
    with pytest.raises(AccelError, match=r"an earlier window were not cleared.*\n.*optimizer.zero_grad\(\)"):
        windows_of_kinds(accelerator, kinds, stepped, None)


@pytest.mark.parametrize("counted", [False, True], ids=["the first items", "after items"])
def test_so_are_those_of_means_that_a_step_has_applied_and_of_a_shared_loss(accelerator, counted):
    models = [net(0), net(1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    *models, first, second = accelerator.prepare(*models, *optimizers)
    if counted:
        with accelerator.accumulate(models[0], items=1):
            accelerator.backward(models[0](batches(1)[0][0]).sum())
            first.step()
        first.zero_grad()
    for applied, (x, y) in zip((True, False), batches(2), strict=True):
        accelerator.backward(sum(F.mse_loss(model(x), y) for model in models))
        if applied:
            first.step()
            second.step()
        with accelerator.accumulate(models[0], items=y.numel()):
            accelerator.backward(F.mse_loss(models[0](x), y, reduction="sum"))
            with pytest.raises(AccelError, match="an earlier window were not cleared"):
                first.step()
            first.zero_grad()
