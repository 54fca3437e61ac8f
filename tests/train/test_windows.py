"""Windows of batches that are counted first: means of what they have, or sums over items, exactly."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import token_losses
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD
from torch.utils.data import DataLoader
from training_problems import batches, net

from accel_core import AccelError, GradScalerKwargs


def assert_near(ours, plain, **tolerance):
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs, **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


def prepared(accelerator, seed=0):
    model = net(seed)
    return accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


def stepped(model, *losses):
    """The gradients and weights of a plain step by the sum of these losses of (model)."""
    optimizer = SGD(model.parameters(), lr=0.1)
    sum(loss(model) for loss in losses).backward()
    optimizer.step()
    return list(model.parameters())


def mean_of_sums(model, part):
    """The loss of one process on all batches of this part, by their samples."""
    return sum(F.mse_loss(model(x), y, reduction="sum") for x, y in part) / sum(len(x) for x, _ in part)


# -- sums over items ----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_window_of_ragged_batches_equals_the_whole_batch(accelerator_of, accumulate, clip):
    accelerator = accelerator_of(gradient_accumulation_steps=accumulate)

    found = token_losses.ours(accelerator, clip, dtype=torch.float64)

    assert_near(found, token_losses.plain(clip, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_so_does_one_that_is_run_as_a_whole(accelerator_of, clip):
    weights, losses = token_losses.by_windows(accelerator_of(gradient_accumulation_steps=4), clip)

    assert_near(weights, token_losses.plain(clip))
    if clip is None:
        assert losses == pytest.approx(token_losses.plain_losses())


COUNTS = [int, float, np.uint8, lambda found: found.to(torch.uint8), lambda found: found.to(torch.bfloat16)]


@pytest.mark.parametrize("kind", COUNTS, ids=["int", "float", "uint8 of numpy", "uint8", "bfloat16"])
def test_items_may_be_numbers_of_any_kind(accelerator_of, kind):
    accelerator = accelerator_of(gradient_accumulation_steps=4)

    found = token_losses.ours(accelerator, items=lambda batch: kind(token_losses.tokens(batch)))

    assert_near(found, token_losses.plain())


def test_a_loss_scale_changes_nothing(accelerator_of):
    scale = GradScalerKwargs(init_scale=32.0)
    accelerator = accelerator_of(
        gradient_accumulation_steps=4, mixed_precision="fp16", kwargs_handlers=[scale]
    )

    assert_near(token_losses.ours(accelerator, 0.05), token_losses.plain(0.05), rtol=2e-2, atol=2e-2)


def test_a_window_without_any_item_has_zero_gradients(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    lengths = [0] * token_losses.GLOBAL + token_losses.LENGTHS[: token_losses.GLOBAL]

    assert_near(token_losses.ours(accelerator, lengths=lengths), token_losses.plain(lengths=lengths))


def test_gradients_may_be_edited_and_clipped_by_torch(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    data = batches(2)
    for window in accelerator.windows(data, model, items=lambda batch: batch[1].numel()):
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y, reduction="sum"))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()

    plain = net()
    F.mse_loss(plain(torch.cat([x for x, _ in data])), torch.cat([y for _, y in data])).backward()
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    SGD(plain.parameters(), lr=0.1).step()
    assert_near(model.parameters(), plain.parameters())


def test_a_closure_computes_the_gradients_of_a_window_of_one(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, LBFGS(model.parameters(), max_iter=3))
    ((x, y),) = batches(1)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y, reduction="sum")
        accelerator.backward(loss)
        return loss / y.numel()

    for window in accelerator.windows([(x, y)], model, items=lambda batch: batch[1].numel()):
        for _ in window:
            optimizer.step(closure)

    plain = net()
    reference = LBFGS(plain.parameters(), max_iter=3)

    def plain_closure():
        reference.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        return loss

    reference.step(plain_closure)
    assert_near(model.parameters(), plain.parameters())


def test_windows_of_one_model_do_not_touch_another(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    (a, opt_a), (b, opt_b) = prepared(accelerator), prepared(accelerator, 1)
    data = batches(2)
    for window in accelerator.windows(data, a, items=lambda batch: len(batch[0])):
        for x, y in window:
            accelerator.backward(F.mse_loss(a(x), y, reduction="sum"), model=a)
            with accelerator.accumulate(b):
                accelerator.backward(F.mse_loss(b(x), y))
                opt_b.step()
            opt_a.step()

    (x1, y1), (x2, y2) = data
    plain = stepped(net(1), lambda m: F.mse_loss(m(x1), y1) / 2, lambda m: F.mse_loss(m(x2), y2) / 2)
    assert_near(b.parameters(), plain)
    assert_near(a.parameters(), stepped(net(), lambda m: mean_of_sums(m, data)))


# -- means ----------------------------------------------------------------------------------------------


def test_a_short_last_window_is_the_mean_of_what_it_has(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)
    model, optimizer = prepared(accelerator)
    sizes = []
    for window in accelerator.windows(accelerator.prepare(DataLoader(batches(6), batch_size=None)), model):
        sizes.append(len(window))
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    plain = net()
    for part in (batches(6)[:4], batches(6)[4:]):
        plain.zero_grad()
        stepped(plain, lambda m, part=part: sum(F.mse_loss(m(x), y) for x, y in part) / len(part))
    assert sizes == [4, 2]
    assert_near(model.parameters(), plain.parameters())


def test_the_size_of_windows_may_be_given(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=4)

    assert [len(window) for window in accelerator.windows(batches(6), size=5)] == [5, 1]


def test_a_window_ends_with_its_own_batches_and_not_with_an_outer_loader(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    seen = []
    for batch in accelerator.prepare(DataLoader(batches(1), batch_size=None)):
        for window in accelerator.windows([batch] * 4, model):
            for x, y in window:
                accelerator.backward(F.mse_loss(model(x), y))
                seen.append(accelerator.sync_gradients)
                optimizer.step()

    assert seen == [False, True, False, True]


def test_a_window_that_is_kept_after_the_loop_can_be_trained_on(accelerator_of):
    """As a program does that overfits a few batches, to see whether it can learn at all."""
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    loader = accelerator.prepare(DataLoader(batches(6), batch_size=None))
    window = next(accelerator.windows(loader, model))
    for _ in range(3):
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    plain = net()
    for _ in range(3):
        plain.zero_grad()
        stepped(plain, lambda m: sum(F.mse_loss(m(x), y) for x, y in batches(2)) / 2)
    assert_near(model.parameters(), plain.parameters())
    assert accelerator.run.active_loaders == []


def test_a_window_reads_no_further_than_its_own_batches(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    read = []
    windows = accelerator.windows(read.append(number) or number for number in range(6))

    next(windows)

    assert read == [0, 1]


def test_a_scheduler_steps_once_a_window(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for window in accelerator.windows(batches(5), model):
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    assert schedule.get_last_lr() == [0.125]


# -- a window in a program ------------------------------------------------------------------------------


def test_a_window_may_be_iterated_again_for_a_second_model(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    (a, opt_a), (b, opt_b) = prepared(accelerator), prepared(accelerator, 1)
    for window in accelerator.windows(batches(4), items=lambda batch: len(batch[0])):
        for model, optimizer in ((a, opt_a), (b, opt_b)):
            for x, y in window:
                accelerator.backward(F.mse_loss(model(x), y, reduction="sum"), model=model)
                optimizer.step()
                optimizer.zero_grad()

    for model, seed in ((a, 0), (b, 1)):
        plain = net(seed)
        for part in (batches(4)[:2], batches(4)[2:]):
            plain.zero_grad()
            stepped(plain, lambda m, part=part: mean_of_sums(m, part))
        assert_near(model.parameters(), plain.parameters())


@pytest.mark.parametrize("leave", ["break", "error"])
def test_a_window_that_is_left_early_is_dropped(accelerator_of, leave):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    model, optimizer = prepared(accelerator)
    weights = [each.detach().clone() for each in model.parameters()]

    def first_batch(window):
        for x, y in window:
            accelerator.backward(100 * F.mse_loss(model(x), y))
            if leave == "error":
                raise ValueError("of the program")
            break

    for number, window in enumerate(accelerator.windows(batches(6), model)):
        if number == 0:
            with suppress(ValueError):
                first_batch(window)
            assert accelerator.run.accumulation is None
            assert all(each.grad is None for each in model.parameters())
            optimizer.step()
            assert_near(model.parameters(), weights, rtol=0, atol=0)
            continue
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()

    part = batches(6)[3:]
    plain = stepped(net(), *(lambda m, x=x, y=y: F.mse_loss(m(x), y) / 3 for x, y in part))
    assert_near(model.parameters(), plain)


@pytest.mark.parametrize("leave", ["break", "error", "clipped"])
def test_a_window_that_is_left_in_its_last_micro_batch_is_dropped(accelerator_of, leave):
    accelerator = accelerator_of(gradient_accumulation_steps=3)
    model, optimizer = prepared(accelerator)

    def leave_in_the_last(window):
        for number, (x, y) in enumerate(window):
            if number == 2 and leave == "error":
                raise torch.OutOfMemoryError("of the program")
            accelerator.backward(100 * F.mse_loss(model(x), y))
            if number == 2:
                if leave == "clipped":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                break

    for number, window in enumerate(accelerator.windows(batches(6), model)):
        if number == 0:
            with suppress(torch.OutOfMemoryError):
                leave_in_the_last(window)
            assert all(each.grad is None for each in model.parameters())
            continue
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()

    plain = stepped(net(), *(lambda m, x=x, y=y: F.mse_loss(m(x), y) / 3 for x, y in batches(6)[3:]))
    assert_near(model.parameters(), plain)


def test_a_window_that_is_left_after_its_step_keeps_the_step(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    for window in accelerator.windows(batches(4), model):
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                break

    plain = net()
    for part in (batches(4)[:2], batches(4)[2:]):
        plain.zero_grad()
        stepped(plain, lambda m, part=part: sum(F.mse_loss(m(x), y) for x, y in part) / 2)
    assert_near(model.parameters(), plain.parameters())


def test_units_that_share_the_loss_of_a_last_micro_batch_that_is_left_are_all_dropped(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    one, first = prepared(accelerator)
    two, second = prepared(accelerator, 1)
    for number, window in enumerate(accelerator.windows(batches(4), one, two)):
        for k, (x, y) in enumerate(window):
            accelerator.backward(F.mse_loss(one(x) + two(x), y))
            if (number, k) == (0, 1):
                break
            first.step(), second.step()

    plain = net(), net(1)
    sum(F.mse_loss(plain[0](x) + plain[1](x), y) / 2 for x, y in batches(4)[2:]).backward()
    for model, by_hand in zip((one, two), plain, strict=True):
        SGD(by_hand.parameters(), lr=0.1).step()
        assert_near(model.parameters(), by_hand.parameters())


def test_accumulate_of_the_same_model_inside_is_refused_and_leaves_the_window_usable(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, _ = prepared(accelerator)
    (window,) = accelerator.windows(batches(2), model)
    for x, y in window:
        refused = pytest.raises(AccelError, match="inside that of the same models")
        with refused, accelerator.accumulate(model):
            pass
        accelerator.backward(F.mse_loss(model(x), y))

    plain = net()
    sum(F.mse_loss(plain(x), y) / 2 for x, y in batches(2)).backward()
    assert_near([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_an_evaluation_in_between_leaves_the_window_alone(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model, optimizer = prepared(accelerator)
    evaluation = accelerator.prepare(DataLoader(batches(3), batch_size=None))
    for window in accelerator.windows(batches(2), model):
        for x, y in window:
            accelerator.backward(F.mse_loss(model(x), y))
            with torch.no_grad():
                for inputs, _ in evaluation:
                    model(inputs)
            optimizer.step()

    plain = stepped(net(), *(lambda m, x=x, y=y: F.mse_loss(m(x), y) / 2 for x, y in batches(2)))
    assert_near(model.parameters(), plain)


def test_a_model_that_is_not_prepared_is_refused(accelerator):
    with pytest.raises(AccelError, match="has not prepared the Linear"):
        accelerator.windows([], nn.Linear(1, 1))
