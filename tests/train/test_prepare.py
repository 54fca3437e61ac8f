"""`prepare` pairs by identity, in any order and number of calls, and refuses what it cannot know."""

from __future__ import annotations

import itertools
import platform
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from training_problems import batches, net

from accel_core import AccelError, ConfigError, DataLoaderConfiguration


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_objects_come_back_prepared_in_the_order_given(accelerator, order):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    objects = [model, optimizer, StepLR(optimizer, 1), DataLoader(batches(2), batch_size=None)]
    kinds = [nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader]
    prepared = accelerator.prepare(*(objects[i] for i in order))
    assert all(isinstance(thing, kinds[i]) for thing, i in zip(prepared, order, strict=True))


def test_one_process_leaves_the_model_the_users_object(accelerator):
    model = net()
    assert accelerator.prepare(model) is model


def test_none_passes(accelerator):
    assert accelerator.prepare(None, None) == (None, None)


@pytest.mark.parametrize("thing", ["hello", {"a": 1}, torch.utils.data.TensorDataset(torch.ones(2))])
def test_an_unknown_object_is_refused_by_number_and_type(accelerator, thing):
    with pytest.raises(AccelError, match=rf"argument 2 is a .*{type(thing).__name__}.*\n.*use it as it is"):
        accelerator.prepare(net(), thing)
    assert accelerator.run.units == []


def test_an_optimizer_prepared_later_completes_the_unit_of_its_parameters(accelerator):
    model = accelerator.prepare(net())
    accelerator.prepare(SGD(model.parameters(), lr=0.1))
    (unit,) = accelerator.run.units
    assert (len(unit.models), len(unit.optimizers)) == (1, 1)


def test_an_optimizer_over_two_models_makes_them_one_unit(accelerator):
    a, b = net(0), net(1)
    accelerator.prepare(a, b, SGD([*a.parameters(), *b.parameters()], lr=0.1))
    (unit,) = accelerator.run.units
    assert [name for name in unit.named_parameters() if name.endswith("0.bias")] == ["0.0.bias", "1.0.bias"]


def test_an_optimizer_over_models_of_two_prepares_is_refused_and_prepared_in_one_call(accelerator):
    a, b = net(0), net(1)
    over_both = SGD([*a.parameters(), *b.parameters()], lr=0.1)
    accelerator.prepare(a, name="first")
    with pytest.raises(
        ConfigError, match=r"of unit 'first' and the new Sequential.*\nprepare .* in one call"
    ):
        accelerator.prepare(b, over_both)
    accelerator.prepare(b, name="second")
    with pytest.raises(ConfigError, match=r"of unit 'first' and unit 'second'.*\nprepare .* in one call"):
        accelerator.prepare(over_both)
    assert [unit.given for unit in accelerator.run.units] == [[a], [b]]
    accelerator.free_memory()
    accelerator.prepare(a, b, over_both)
    assert [unit.given for unit in accelerator.run.units] == [[a, b]]


def test_an_optimizer_that_is_refused_late_leaves_its_unit_as_it_was(accelerator):
    model = accelerator.prepare(net())
    (unit,) = accelerator.run.units
    unit.hooks.wrap_optimizer = refusing
    with pytest.raises(ValueError, match="not this one"):
        accelerator.prepare(SGD(model.parameters(), lr=0.1))
    prepared = accelerator.run.prepared
    assert (unit.optimizers, prepared.optimizers, prepared.trained) == ([], [], [])
    del unit.hooks.wrap_optimizer
    assert accelerator.prepare(SGD(model.parameters(), lr=0.1)).unit is unit
    assert (len(unit.optimizers), prepared.trained) == (1, [unit])


def test_a_model_that_was_refused_late_is_not_half_known(accelerator_of, monkeypatch):
    accelerator = accelerator_of(mixed_precision="bf16")
    unit = accelerator.run.make_unit(None, None)
    unit.hooks.grad_scaler = refusing
    model = net()
    with monkeypatch.context() as patch:
        patch.setattr(accelerator.run, "make_unit", lambda *_: unit)
        with pytest.raises(ValueError, match="not this one"):
            accelerator.prepare(model)
    assert (accelerator.run.units, list(model._forward_hooks)) == ([], [])
    with pytest.raises(AccelError, match="no prepared model has"):
        accelerator.prepare(SGD(model.parameters(), lr=0.1))


def test_a_loader_that_cannot_be_had_is_refused_before_anything_is_prepared(accelerator_of):
    accelerator = accelerator_of(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))

    class Own(DataLoader):
        pass

    with pytest.raises(ConfigError, match="is a DataLoader of your own"):
        accelerator.prepare(net(), Own(batches(2), batch_size=None))
    assert accelerator.run.units == []


def refusing(*_):
    raise ValueError("not this one")


def test_optimizers_of_two_models_make_two_units(accelerator):
    a, b = net(0), net(1)
    accelerator.prepare(SGD(b.parameters(), lr=0.1), a, SGD(a.parameters(), lr=0.1), b)
    assert [len(unit.optimizers) for unit in accelerator.run.units] == [1, 1]
    assert accelerator.run.prepared.unit_of_model(a) is not accelerator.run.prepared.unit_of_model(b)


def test_two_optimizers_may_share_a_model(accelerator):
    model = net()
    accelerator.prepare(model, SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1))
    assert [len(unit.optimizers) for unit in accelerator.run.units] == [2]


def test_preparing_again_gives_the_same_objects(accelerator):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    first = accelerator.prepare(model, optimizer)
    assert accelerator.prepare(model, optimizer) == first
    assert accelerator.prepare(*first) == first


def test_a_model_without_values_is_refused_by_the_name_of_a_weight(accelerator):
    model = net()
    model[0].to("meta")
    with pytest.raises(AccelError, match=r"0.weight of the Sequential is on the meta device.*\n.*to_empty"):
        accelerator.prepare(model)
    model[0].to_empty(device="cpu")
    assert accelerator.prepare(model) is model


def test_an_optimizer_of_an_unprepared_model_is_refused(accelerator):
    with pytest.raises(AccelError, match=r"shape \(16, 6\) that no prepared model has"):
        accelerator.prepare(SGD(net().parameters(), lr=0.1))


def test_a_loose_parameter_in_an_optimizer_is_refused(accelerator):
    model, loose = net(), nn.Parameter(torch.ones(3))
    with pytest.raises(AccelError, match=r"shape \(3,\)"):
        accelerator.prepare(model, SGD([*model.parameters(), loose], lr=0.1))


def test_a_scheduler_of_an_unprepared_optimizer_is_refused(accelerator):
    model = net()
    with pytest.raises(AccelError, match="StepLR schedules an optimizer that was not prepared"):
        accelerator.prepare(model, StepLR(SGD(model.parameters(), lr=0.1), 1))


def test_tied_weights_have_one_name(accelerator):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    accelerator.prepare(model)
    (unit,) = accelerator.run.units
    assert (list(unit.named_parameters()), unit.aliases) == (["0.weight"], {"1.weight": "0.weight"})


def test_units_can_be_named(accelerator):
    accelerator.prepare(net(), name="student")
    with pytest.raises(ConfigError, match="already has a unit 'student'"):
        accelerator.prepare(net(1), name="student")


def test_an_unknown_strategy_is_refused_with_those_there_are(accelerator):
    with pytest.raises(ConfigError, match=r"strategy='singel'\): no such strategy; this run has single"):
        accelerator.prepare(net(), strategy="singel")


def test_a_run_that_has_ended_refuses_more(accelerator):
    accelerator.end_training()
    with pytest.raises(AccelError, match="this run has ended"):
        accelerator.prepare(net())


def test_backward_of_a_run_that_has_ended_is_refused(accelerator):
    model = net()
    model, _ = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    loss = model(batches(1)[0][0]).sum()
    accelerator.end_training()
    with pytest.raises(AccelError, match="this run has ended"):
        accelerator.backward(loss)


def test_free_memory_forgets_everything(accelerator):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer)
    assert accelerator.free_memory(*prepared) == [None, None]
    assert accelerator.run.units == []
    accelerator.prepare(model, optimizer)
    assert len(accelerator.run.units) == 1


def test_free_memory_collects_what_is_in_a_cycle(accelerator):
    model = net()
    model.forward_of = model.forward  # as wrapped models have
    gone = weakref.ref(accelerator.prepare(model))
    del model
    accelerator.free_memory()
    assert gone() is None


HOST_MEMORY = """
import torch
from accel_core import Accelerator

def pages():
    status = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

accelerator = Accelerator(cpu=True)
before = pages()
small, last = [torch.zeros(64) for _ in range(50_000)], torch.zeros(64)
most = pages()
del small
accelerator.free_memory()
print((pages() - before) / (most - before))
"""


@pytest.mark.full
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc keeps such pages and gives them back"
)
def test_free_memory_gives_pages_of_the_host_back_that_small_tensors_lay_in(run_command):
    done = run_command([sys.executable, "-c", HOST_MEMORY], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) < 0.5


def test_what_was_prepared_before_free_memory_is_prepared_anew(accelerator_of):
    accelerator = accelerator_of(gradient_accumulation_steps=2)
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    prepared = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, 0.5))
    accelerator.free_memory()
    model, optimizer, schedule = accelerator.prepare(*prepared)
    rates = []
    for x, _ in batches(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            schedule.step()
        rates += schedule.get_last_lr()
    assert rates == [0.1, 0.05, 0.05, 0.025]
    (unit,) = accelerator.run.units
    assert (len(unit.optimizers), len(unit.schedulers)) == (1, 1)


def test_an_optimizer_that_is_kept_over_free_memory_does_not_step(accelerator):
    model = net()
    _, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    accelerator.free_memory()
    with pytest.raises(AccelError, match=r"before free_memory.*\nprepare it again"):
        optimizer.step()


def test_a_schedule_of_a_prepared_optimizer_is_prepared_anew(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    schedule = accelerator.prepare(StepLR(optimizer, 1, 0.5))
    for x, _ in batches(2):
        accelerator.backward(model(x).mean())
        optimizer.step()
        schedule.step()
        accelerator.free_memory()
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_an_object_that_is_prepared_already_comes_back_as_before(accelerator):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    objects = [model, optimizer, StepLR(optimizer, 1)]
    prepared = accelerator.prepare(*objects)
    assert accelerator.prepare(*objects) == prepared
    assert accelerator.prepare(*prepared) == prepared
    assert accelerator.run.prepared.ordered == list(prepared)


@pytest.mark.parametrize(("usual", "place"), [(True, "meta"), (False, "cpu")])
def test_a_placement_of_none_is_that_of_the_run(accelerator_of, usual, place):
    accelerator = accelerator_of(device_placement=usual)
    accelerator.run.device = torch.device("meta")
    model = accelerator.prepare(net(), device_placement=[None])
    assert {parameter.device.type for parameter in model.parameters()} == {place}


def test_an_object_that_is_given_twice_is_prepared_once(accelerator):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    objects = [model, optimizer, StepLR(optimizer, 1)]
    prepared = accelerator.prepare(*objects, *objects)
    assert prepared[:3] == prepared[3:]
    assert accelerator.run.prepared.ordered == list(prepared[:3])
    (unit,) = accelerator.run.units
    assert (len(unit.models), unit.optimizers, unit.schedulers) == (1, [optimizer], [objects[2]])


@pytest.mark.parametrize("thing", [None, 3, [nn.Linear(1, 1)]], ids=str)
def test_what_is_no_model_is_not_unwrapped(accelerator, thing):
    with pytest.raises(AccelError, match=r"unwrap_model: a \w+ is not a model"):
        accelerator.unwrap_model(thing)


def test_evaluation_mode_prepares_without_training(accelerator):
    model = accelerator.prepare_model(net(), evaluation_mode=True)
    assert accelerator.run.prepared.unit_of_model(model).strategy == "single"


def test_a_state_put_in_the_place_of_an_optimizers_is_the_inner_ones(accelerator):
    model = net()
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    state = {parameter: {} for parameter in model.parameters()}
    optimizer.state = state
    assert optimizer.optimizer.state is state
