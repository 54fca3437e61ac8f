"""Several models of which `accumulate` names one: the others' optimizers step at the end of its window."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from peers import needs_accelerate, said

TRAINED = """
import json, torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=PRECISION)
models = [torch.nn.Linear(2, 1) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
schedule = torch.optim.lr_scheduler.StepLR(optimizers[1], 1, 0.5)
batches = torch.utils.data.DataLoader(torch.randn(10, 2), batch_size=1)
first, second, one, other, schedule, batches = accelerator.prepare(*models, *optimizers, schedule, batches)

def train(model, optimizer, batch):
    accelerator.backward(model(batch).pow(2).sum())
    if accelerator.sync_gradients:
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()

seen = []
for batch in batches:
    BODY
    schedule.step()
    seen.append([p.tolist() for model in models for p in model.parameters()] + schedule.get_last_lr())
if accelerator.is_main_process:
    print(json.dumps(seen))
"""
INSIDE = """with accelerator.accumulate(first):
        train(first, one, batch)
        train(second, other, batch)"""
BEFORE_AND_AFTER = """train(second, other, batch)
    with accelerator.accumulate(first):
        train(first, one, batch)
    train(second, other, batch)"""
ONE_LOSS = """with accelerator.accumulate(first):
        accelerator.backward((first(batch) + second(batch)).pow(2).sum())
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()"""

CLEARED = """with accelerator.accumulate(first):
        accelerator.backward((first(batch) * second(batch)).pow(2).sum())
        one.step()
        one.zero_grad()
        other.zero_grad()
        train(second, other, batch)"""

BY_HAND = """accelerator._do_sync()
    if accelerator.sync_gradients:
        train(first, one, batch)
    else:
        with accelerator.no_sync(first):
            train(first, one, batch)"""


@needs_accelerate
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.by_default("2")
def test_a_window_that_a_program_counts_ends_with_its_loader(processes, run_processes):
    """`_do_sync` is called by programs that do not use `accumulate`."""
    code = TRAINED.replace("BODY", BY_HAND).replace("steps=2", "steps=3").replace("PRECISION", "'no'")

    assert said(run_processes, code, ours=True, processes=processes) == said(
        run_processes, code, ours=False, processes=processes
    )


@needs_accelerate
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "body", [INSIDE, BEFORE_AND_AFTER, ONE_LOSS, CLEARED], ids=["inside", "around", "one loss", "cleared"]
)
@pytest.mark.by_default("inside-2")
def test_a_model_that_is_not_named_trains_as_in_accelerate(body, processes, run_processes):
    code = TRAINED.replace("BODY", body).replace("PRECISION", "'no'")

    assert said(run_processes, code, ours=True, processes=processes) == said(
        run_processes, code, ours=False, processes=processes
    )


SHARDED = """
import json, torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

torch.manual_seed(0)
plugin = FullyShardedDataParallelPlugin(fsdp_version=VERSION) if VERSION else None
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
assert accelerator.is_fsdp2 == (VERSION == 2)
models = [torch.nn.Linear(2, 3) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
batches = torch.utils.data.DataLoader(torch.randn(12, 2), batch_size=1)
first, second, one, other, batches = accelerator.prepare(*models, *optimizers, batches)
seen = []
for batch in batches:
    with accelerator.accumulate(first):
        for model, optimizer in ((first, one), (second, other)):
            accelerator.backward(model(batch).pow(2).sum())
            optimizer.step()
            optimizer.zero_grad()
    held = [accelerator.get_state_dict(model) for model in (first, second)]
    seen.append([number for state in held for value in state.values() for number in value.flatten().tolist()])
print(json.dumps(seen))
"""


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.needs("accel-fsdp")
def test_a_sharded_model_that_is_not_named_trains_as_under_ddp(version, run_processes):
    found = said(run_processes, SHARDED.replace("VERSION", str(version)), ours=True, processes=2)
    usual = said(run_processes, SHARDED.replace("VERSION", "None"), ours=True, processes=2)

    assert len({str(each) for each in found}) == 4  # both models step in each second micro-batch of six
    assert found == [pytest.approx(each, abs=1e-6) for each in usual]


def test_under_fp16_one_scale_is_for_both(run_processes):
    code = TRAINED.replace("PRECISION", "'fp16'")
    named = INSIDE.replace("accumulate(first)", "accumulate(first, second)")

    assert said(run_processes, code.replace("BODY", INSIDE), ours=True) == said(
        run_processes, code.replace("BODY", named), ours=True
    )


def test_a_step_that_is_left_out_does_not_keep_a_scale():
    """Gradients of a later window are unscaled before they are clipped."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="fp16")
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    norms = []
    for _ in range(4):
        with accelerator.accumulate(models[0]):
            accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(models[1].parameters(), 1e9).item())
                models[1].zero_grad()
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert norms == pytest.approx([2**0.5] * 2, rel=1e-3)


def steps_of_two(contexts):
    """Return after which micro-batches each of two models has changed."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    changed: list[list[int]] = [[], []]
    for number in range(4):
        for names, trained in contexts:
            before = [model.bias.item() for model in models]
            with accelerator.accumulate(*(models[name] for name in names)):
                for which in trained:
                    accelerator.backward(models[which](torch.ones(1, 1)).sum())
                    optimizers[which].step()
                    optimizers[which].zero_grad()
            for which, model in enumerate(models):
                if model.bias.item() != before[which]:
                    changed[which].append(number)
    return changed


def test_models_that_are_named_in_turn_count_each_their_own():
    assert steps_of_two([([0], [0]), ([1], [1])]) == [[1, 3], [1, 3]]


def test_a_model_that_is_named_inside_begins_to_count_there():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    seen = []
    for _ in range(4):
        with accelerator.accumulate(models[0]):
            outer = accelerator.sync_gradients
            with accelerator.accumulate(models[1]):
                seen.append((outer, accelerator.sync_gradients, accelerator.sync_gradients))
    assert seen == [(False,) * 3, (True,) * 3] * 2


def test_a_boundary_that_a_program_sets_counts_for_both():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models, optimizers = accelerator.prepare(*models), accelerator.prepare(*optimizers)
    with accelerator.accumulate(models[0]):
        accelerator.sync_gradients = True
        before = models[1].bias.item()
        accelerator.backward(models[1](torch.ones(1, 1)).sum())
        optimizers[1].step()
    assert models[1].bias.item() != before


def test_a_micro_batch_that_a_follower_cannot_enter_is_not_entered(monkeypatch):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [torch.nn.Linear(2, 1) for _ in range(2)]
    first, _, *_ = accelerator.prepare(*models, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in models))
    follower = accelerator.run.units[1].window

    def interrupted(window, index):
        if window is follower:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(follower), "move_to", interrupted)
    with pytest.raises(KeyboardInterrupt), accelerator.accumulate(first):
        pass

    assert accelerator.run.accumulation is None
