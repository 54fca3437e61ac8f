"""`prepare` by Accelerate's rules, where accel-core's are stricter or its objects say other things."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from peers import needs_accelerate, said
from torch.utils.data import DataLoader

from accel_core import open_checkpoint, storage_at

RATES = """
import json, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

loading = DataLoaderConfiguration(split_batches=SPLIT)
plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=ADJUST)
accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dataloader_config=loading)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
rates = []
for _ in range(10):
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    rates.append(schedule.get_last_lr()[0])
if accelerator.is_main_process:
    print(json.dumps(rates))
"""


@needs_accelerate
@pytest.mark.parametrize(("adjust", "split"), [(True, False), (False, True)])
def test_a_schedule_goes_on_as_fast_as_in_accelerate(
    tmp_path: Path, monkeypatch, adjust, split, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    code = RATES.replace("ADJUST", str(adjust)).replace("SPLIT", str(split))

    assert said(run_processes, code, ours=True, processes=2) == said(
        run_processes, code, ours=False, processes=2
    )


def of_two_epochs(split):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split), cpu=True)
    model, data = torch.nn.Linear(2, 1), DataLoader(torch.ones(20, 2), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * len(data))
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    warned = []
    logging.getLogger("accel_core").addHandler(handler)
    accelerator.prepare(model, optimizer, schedule, data)
    return warned, [line for line in accelerator.explain().splitlines() if "OneCycleLR of" in line]


@pytest.mark.parametrize("split", [False, True])
def test_a_schedule_made_before_prepare_keeps_its_epochs_in_silence(run_processes, split):
    for warned, epochs in run_processes(of_two_epochs, split):
        assert warned == []
        assert epochs == ["  OneCycleLR of 20 steps ends after 2 epoch(s), if it steps with the optimizer"]


def test_an_optimizer_may_come_before_its_model(capsys):
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "are not reduced" in capsys.readouterr().err
    model = accelerator.prepare(model)

    assert accelerator._optimizers == (optimizer,)
    assert optimizer.unit is not None
    before = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert not optimizer.step_was_skipped


def test_an_optimizer_that_came_before_its_model_is_among_what_a_checkpoint_lists(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.prepare(model)
    accelerator.prepare(optimizer)
    accelerator.save_state(tmp_path / "saved")
    with open_checkpoint(storage_at(tmp_path / "saved")) as opened:
        places = opened.state["prepared"]["optimizers"]
    assert places == [["unit0", 0]]


def test_an_optimizer_of_no_prepared_model_steps_and_is_saved(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.Adam([weight], lr=0.1))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(weight.sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert weight.item() == pytest.approx(0.9)
    assert schedule.get_last_lr() == pytest.approx([0.01])
    accelerator.save_state(tmp_path / "state")
    optimizer.state[weight]["exp_avg"].zero_()
    accelerator.load_state(tmp_path / "state")
    assert optimizer.state[weight]["exp_avg"].item() != 0


@pytest.mark.parametrize(
    "made",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 1)],
            [2],
        ),
    ],
)
def test_a_schedule_of_an_optimizer_of_no_prepared_model_is_saved(tmp_path, made):
    def run():
        accelerator, weight = Accelerator(), torch.nn.Parameter(torch.ones(1))
        plain = torch.optim.SGD([weight], lr=1.0)
        return accelerator, *accelerator.prepare(plain, made(plain))

    def step(optimizer, schedule, count):
        for _ in range(count):
            optimizer.step()
            schedule.step()
        return schedule.get_last_lr(), optimizer.param_groups[0]["lr"]

    accelerator, optimizer, schedule = run()
    step(optimizer, schedule, 3)
    accelerator.save_state(tmp_path / "state")
    expected = step(optimizer, schedule, 2)
    assert accelerator._schedulers == (schedule,)
    assert accelerator._custom_objects == ()

    accelerator, *again = run()
    accelerator.load_state(tmp_path / "state")
    assert step(*again, 2) == expected


class OwnSchedule:
    """No class of torch's."""

    def __init__(self, optimizer=None):
        self.steps = 0
        if optimizer is not None:
            self.optimizer = optimizer

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@pytest.mark.parametrize("names_it", [True, False])
def test_a_schedule_of_ones_own_class_steps_with_the_optimizer_and_is_saved(tmp_path, names_it):
    accelerator, model = Accelerator(gradient_accumulation_steps=2), torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, plain)
    schedule = accelerator.prepare_scheduler(OwnSchedule(plain if names_it else None))
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert isinstance(schedule, AcceleratedScheduler)
    assert schedule.scheduler.steps == 2
    accelerator.save_state(tmp_path / "state")
    schedule.scheduler.steps = 0
    accelerator.load_state(tmp_path / "state")
    assert schedule.scheduler.steps == 2
    assert accelerator.prepare_scheduler(schedule) is schedule


@pytest.mark.parametrize("split", [True, False])
def test_a_schedule_that_ends_is_asked_for_more_under_split_batches_alone(split):
    config = DataLoaderConfiguration(split_batches=split)
    accelerator, model = Accelerator(dataloader_config=config), torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    cycle = torch.optim.lr_scheduler.OneCycleLR(plain, 0.1, total_steps=3)
    model, optimizer, schedule = accelerator.prepare(model, plain, cycle)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    optimizer.step()
    with pytest.raises(ValueError, match="Tried to step 4 times") if split else nullcontext():
        schedule.step()


def test_a_schedule_steps_on_where_the_states_were_reset():
    accelerator, model = Accelerator(), torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(
        model, plain, torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    )
    AcceleratorState._reset_state(reset_partial_state=True)  # TrainingArguments does so
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


STREAM = """
import json, logging, os, sys, torch
from accelerate import Accelerator

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(12))

accelerator = Accelerator(cpu=True)
data = Stream() if KIND == "stream" else range(14)
model, loader = accelerator.prepare(
    torch.nn.Linear(1, 1), torch.utils.data.DataLoader(data, batch_size=3, drop_last=KIND == "dropping")
)
for _ in loader:
    if accelerator.gradient_state.end_of_dataloader:
        accelerator.save_state(os.environ["PYTEST_TMP"] + "/state")
accelerator.wait_for_everyone()
expected = torch.rand(()).item()
warned = []
logging.getLogger("accelerate.checkpointing").warning = lambda *words: warned.append(words)
torch.manual_seed(9)
accelerator.load_state(os.environ["PYTEST_TMP"] + "/state")
print(json.dumps([len(warned), torch.rand(()).item() == expected]))
"""


@pytest.mark.parametrize("kind", ["stream", "dropping", "whole"])
def test_a_state_saved_at_the_last_batch_is_of_all_ranks(tmp_path, monkeypatch, kind, run_processes):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    assert said(run_processes, STREAM.replace("KIND", repr(kind)), ours=True, processes=2) == [0, True]


def test_what_is_prepared_is_of_accelerates_classes_and_says_so():
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)
    loader = DataLoader(list(range(4)))
    prepared = accelerator.prepare(model, plain, schedule, loader)

    assert all(each._is_accelerate_prepared for each in prepared)
    kinds = (torch.nn.Linear, AcceleratedOptimizer, AcceleratedScheduler, DataLoaderShard)
    assert all(isinstance(each, kind) for each, kind in zip(prepared, kinds, strict=True))
    assert isinstance(prepared[3], DataLoaderStateMixin)
    assert accelerator._schedulers == (prepared[2],)
    assert accelerator.prepare(*prepared) == prepared


def test_a_model_can_be_prepared_by_itself_also_for_evaluation_only():
    accelerator = Accelerator()
    model = accelerator.prepare_model(torch.nn.Linear(1, 1))
    frozen = accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True)

    assert accelerator.prepare_model(model) is model
    assert isinstance(accelerator.unwrap_model(frozen), torch.nn.Linear)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_an_optimizer_can_be_told_that_it_was_skipped():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(
        model, plain, torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    )
    optimizer._is_overflow = True
    schedule.step()
    assert (optimizer.step_was_skipped, schedule.get_last_lr()) == (True, [1.0])
    assert optimizer._is_overflow
    optimizer._is_overflow = False
    assert not optimizer._is_overflow
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def test_an_optimizer_of_ones_own_class_is_of_that_class_and_runs_its_methods():
    class Counting(AcceleratedOptimizer):
        def __init__(self, optimizer):
            super().__init__(optimizer)
            self.steps = 0

        def step(self, closure=None):
            self.steps += 1
            super().step(closure)

    model = torch.nn.Linear(1, 1, bias=False)
    mine = Counting(torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.item()
    model(torch.ones(1)).backward()
    mine.step()

    assert isinstance(mine, Counting)
    assert type(mine).__name__ == "Counting"
    assert (mine.steps, model.weight.item()) == (1, before - 1.0)


def test_a_prepared_loader_says_where_it_is():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(10)), batch_size=4))
    seen = [(loader.end_of_dataloader, accelerator.gradient_state.remainder) for _ in loader]

    assert seen == [(False, 2), (False, 2), (True, 2)]
    assert loader.iteration == 1
    assert loader.gradient_state.active_dataloader is None


@pytest.mark.parametrize("setting", [False, True])
def test_a_prepared_loader_says_how_it_reads(setting):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=setting))
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=3, drop_last=setting))

    assert loader._non_blocking is setting
    assert loader._drop_last is setting
    assert loader.use_stateful_dataloader is False
    assert loader.skip_batches == 0
    assert loader.device == accelerator.device


def test_the_number_of_the_next_epoch_can_be_assigned_and_gives_its_order():
    def third_epoch(go_there):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
        loader = accelerator.prepare(
            DataLoader(list(range(64)), shuffle=True, generator=torch.Generator().manual_seed(1))
        )
        go_there(loader)
        return loader.iteration, [int(batch) for batch in loader]

    read = third_epoch(lambda loader: [list(loader), list(loader)])
    assigned = third_epoch(lambda loader: setattr(loader, "iteration", 2))
    assert assigned == read
    assert read[0] == 2


def test_a_loader_that_one_process_reads_counts_as_dispatcher():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(list(range(4))))

    assert isinstance(loader, DataLoaderDispatcher)
    assert not isinstance(loader, DataLoaderShard)


def test_objects_that_cannot_be_saved_are_named_by_their_place():
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="Item at index 0") as caught:
        accelerator.register_for_checkpointing(torch.ones(1), torch.nn.Linear(1, 1))
    assert "Item at index 1" not in str(caught.value)


def test_a_schedule_may_come_before_its_optimizer(tmp_path):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.25
    accelerator.save_state(tmp_path / "state")
    schedule.scheduler.last_epoch = 0
    accelerator.load_state(tmp_path / "state")
    assert schedule.scheduler.last_epoch == 2


def test_a_schedule_before_an_optimizer_without_model_in_one_call_follows_the_optimizer():
    accelerator = Accelerator()
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule, optimizer = accelerator.prepare(torch.optim.lr_scheduler.StepLR(plain, 1), plain)

    assert schedule.optimizers == [optimizer]


def test_what_prepare_notes_about_an_object_is_not_in_the_objects_state():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    known = {*schedule.state_dict()}
    prepared = accelerator.prepare(model, optimizer, schedule)

    assert all(each._is_accelerate_prepared for each in prepared)
    assert {*prepared[2].state_dict()} == known


LOCAL_STEPS = """
import json, torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
seen = []
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3) as local:
    for number in range(8):
        with accelerator.accumulate(model):
            inputs = torch.full((1, 2), number / 8 + accelerator.process_index)
            accelerator.backward((model(inputs) - 1).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        seen.append(accelerator.unwrap_model(model).weight.flatten().tolist())
if accelerator.is_main_process:
    print(json.dumps(seen))
"""


@needs_accelerate
def test_local_sgd_averages_as_often_as_in_accelerate(run_processes):
    theirs, ours = (said(run_processes, LOCAL_STEPS, ours=each, processes=2) for each in (False, True))

    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))


ANEW = """
import json, torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(2, 1)
torch.nn.init.ones_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
_, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
ANEW
ready = accelerator.prepare(model)
assert accelerator.prepare(optimizer, schedule) == (optimizer, schedule)
seen = []
for _ in range(4):
    with accelerator.accumulate(ready):
        accelerator.backward(ready(torch.ones(1, 2)).square().sum())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    seen.append(model.weight.tolist() + schedule.get_last_lr() + [len(accelerator._optimizers)])
if accelerator.is_main_process:
    print(json.dumps(seen))
"""


@needs_accelerate
@pytest.mark.parametrize(
    "anew",
    ["accelerator.free_memory()", "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)"],
    ids=["free_memory", "another Accelerator"],
)
@pytest.mark.parametrize("order", ["model first", "together", "model last"])
def test_prepared_objects_are_prepared_again_as_in_accelerate(anew, order, run_processes):
    code = ANEW.replace("\nANEW\n", f"\n{anew}\n")
    first, then = "ready = accelerator.prepare(model)", "accelerator.prepare(optimizer, schedule)"
    if order == "together":
        code = code.replace(first, "ready, *_ = accelerator.prepare(model, optimizer, schedule)")
    elif order == "model last":
        code = code.replace(first, f"{then}\n{first}")
    assert said(run_processes, code, ours=True) == said(run_processes, code, ours=False)


def test_a_schedule_that_is_prepared_again_is_saved(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    accelerator.free_memory()
    _, optimizer, schedule = accelerator.prepare(*prepared)
    accelerator.save_state(str(tmp_path / "state"))
    optimizer.step()
    schedule.step()
    accelerator.load_state(str(tmp_path / "state"))
    assert schedule.get_last_lr() == [0.1]
