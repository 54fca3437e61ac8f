"""The average follows applied optimizer steps, and evaluations of it leave the training alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ema_problem as problem
import pytest
import torch
from torch import nn

from accel_core import (
    Accelerator,
    AccelError,
    Checkpoint,
    CheckpointError,
    ConfigError,
    LocalSGD,
    full_leaf,
    open_checkpoint,
    storage_at,
)
from accel_ema import EMAConfig, averaged


@pytest.mark.needs("accel-fsdp")
@pytest.mark.parametrize(
    "way", ["fsdp", *(pytest.param(way, marks=pytest.mark.full) for way in ("ddp", "fsdp-1"))]
)
def test_evaluations_of_the_average_change_no_later_step(way: str, run_processes) -> None:
    evaluated = _run(run_processes, problem.evaluated_between, way, evaluates=True)
    alone = _run(run_processes, problem.evaluated_between, way, evaluates=False)
    assert all(torch.equal(evaluated[name], alone[name]) for name in alone if name != "seen")


@pytest.mark.needs("accel-ddp")
def test_a_window_of_micro_batches_is_one_update(run_processes) -> None:
    for found in run_processes(_accumulated, world=2):
        torch.testing.assert_close(found["average"], found["formula"], rtol=1e-6, atol=1e-6)
        assert found["steps"] == problem.STEPS


@pytest.mark.needs("accel-ddp")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_steps_skipped_by_an_overflow_are_no_updates(world: int, run_processes) -> None:
    for skipped, found, expected in run_processes(problem.overflowed, world, world=world):
        assert skipped == [False, True, False, True, False]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.needs("accel-ddp")
def test_ranks_that_step_alone_share_their_averages_when_they_share_their_weights(run_processes) -> None:
    for found, formula in run_processes(_local_sgd, world=2):
        torch.testing.assert_close(found, formula, rtol=1e-6, atol=1e-6)


def _local_sgd() -> tuple[torch.Tensor, torch.Tensor]:
    accelerator = Accelerator(cpu=True, strategy="ddp", plugins=[EMAConfig(decay=0.5, warmup="none")])
    torch.manual_seed(0)
    own = nn.Linear(3, 2, bias=False)
    model, optimizer = accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    average: torch.Tensor | None = None
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for number in range(4):
            accelerator.backward(model(torch.full((1, 3), 1.0 + accelerator.process_index)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            weight = own.weight.detach().clone()
            average = weight if average is None else average.lerp(weight, 0.5)
            local.step()
            if number % 2:
                average = accelerator.reduce(average, "mean")
    with averaged(model):
        found = own.weight.detach().clone()
    assert average is not None
    return found, average


def _accumulated() -> dict[str, object]:
    return problem.trained("ddp", {}, gradient_accumulation_steps=3)


def _run(run_processes, function: object, *args: object, **options: object) -> dict[str, torch.Tensor]:
    return run_processes(_call, function.__name__, args, options, world=2)[0]  # type: ignore[attr-defined]


def _call(name: str, args: tuple[object, ...], options: dict[str, object]) -> object:
    return getattr(problem, name)(*args, **options)


# -- in one process --------------------------------------------------------------------------------


def prepared(**options: object) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(**options)])  # type: ignore[arg-type]
    model = nn.Linear(3, 2)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def step(accelerator: Accelerator, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.ones(1, 3)).square().sum())
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_before_the_first_update_the_average_is_the_weights() -> None:
    accelerator, model, optimizer = prepared(update_after=2)
    for _ in range(2):
        step(accelerator, model, optimizer)
        before = model.weight.clone()
        with averaged(model):
            assert torch.equal(model.weight, before)


def test_each_optimizer_of_a_model_counts_for_its_own_weights() -> None:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none")])
    model = nn.Linear(3, 2)
    rates = {"weight": 0.1, "bias": 0.2}
    first, second = (torch.optim.SGD([getattr(model, name)], lr=rate) for name, rate in rates.items())
    model, first, second = accelerator.prepare(model, first, second)
    expected = {}
    for number in range(4):
        step(accelerator, model, first, *([second] if number != 2 else []))
        for name in ["weight", *(["bias"] if number != 2 else [])]:
            now = getattr(model, name).detach().clone()
            expected[name] = now if name not in expected else expected[name].lerp(now, 0.5)
        second.zero_grad()
    with averaged(model):
        torch.testing.assert_close({name: getattr(model, name).detach() for name in rates}, expected)


def test_each_unit_has_an_average_of_its_own() -> None:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none")])
    models = [nn.Linear(3, 2), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    teacher = accelerator.prepare(nn.Linear(3, 2))
    for number in range(2):
        models[number], optimizers[number] = accelerator.prepare(models[number], optimizers[number])
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(accelerator, model, optimizer)
    before = [model.weight.clone() for model in models]
    with averaged(models[0]):
        assert not torch.equal(models[0].weight, before[0])
        assert torch.equal(models[1].weight, before[1])
        with averaged(models[1]):
            assert not torch.equal(models[1].weight, before[1])
    with averaged(*models):
        assert not torch.equal(models[1].weight, before[1])
    with pytest.raises(AccelError, match="has no optimizer"), averaged(teacher):
        pass


def test_weights_that_are_unfrozen_later_are_averaged_from_then_on() -> None:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none")])
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(requires_grad=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        step(accelerator, model, optimizer)
    model.bias.requires_grad_(requires_grad=True)
    biases = []
    for _ in range(3):
        step(accelerator, model, optimizer)
        biases.append(model.bias.detach().clone())
    expected = biases[0].lerp(biases[1], 0.5).lerp(biases[2], 0.5)
    with averaged(model):
        torch.testing.assert_close(model.bias.detach(), expected)


def thawed(folder: Path | None) -> dict[str, torch.Tensor]:
    """Unfreeze a layer, evaluate and save before its first update if a folder is given; return averages."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none", update_every=2)])
    model = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(True)
        if folder is not None and step:
            with averaged(model):
                pass
            accelerator.save_state(folder / str(step))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    with averaged(model):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_evaluations_and_saves_before_the_first_update_change_no_average(tmp_path: Path) -> None:
    expected, found = thawed(None), thawed(tmp_path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_frozen_before_its_first_update_is_not_averaged_for_being_evaluated(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(update_after=1)])
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with averaged(model):
        model.bias.requires_grad_(requires_grad=False)
    for _ in range(2):
        step(accelerator, model, optimizer)
    with open_checkpoint(storage_at(accelerator.save_state(tmp_path / "saved"))) as opened:
        tensors = Checkpoint.with_tensors(opened).tensors
    averages = {key for _, key in tensors if key.startswith("plugins/ema/")}
    assert averages == {"plugins/ema/weights/weight"}


def test_weights_in_16_bits_are_averaged_in_32() -> None:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.999, warmup="none")])
    model = nn.Linear(3, 2).bfloat16()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.data.fill_(1.0)
    expected = None
    for number in range(300):
        with torch.no_grad():
            model.weight.fill_(1.0 + (number > 0))
        accelerator.backward((model(torch.ones(1, 3).bfloat16()) * 0).sum())
        optimizer.step()
        now = model.weight.detach().float()
        expected = now.clone() if expected is None else expected.lerp(now, 0.001)
    with averaged(model):
        torch.testing.assert_close(model.weight.detach(), expected.bfloat16())
        assert model.weight[0, 0] > 1.2, "in 16 bits it would never have moved"
    assert model.weight[0, 0] == 2


def test_weights_that_get_other_memory_are_followed() -> None:
    accelerator, model, optimizer = prepared(decay=0.5, warmup="none")
    step(accelerator, model, optimizer)
    first = model.weight.detach().clone()
    model.weight.data = model.weight.data.clone() + 1
    step(accelerator, model, optimizer)
    expected = first.lerp(model.weight.detach(), 0.5)
    with averaged(model):
        torch.testing.assert_close(model.weight.detach(), expected)


def test_weights_that_an_optimizer_gets_later_are_averaged_from_then_on() -> None:
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5, warmup="none")])
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    optimizers = [torch.optim.SGD(model[number].parameters(), lr=0.1) for number in range(2)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    step(accelerator, model, *optimizers)
    model[2] = nn.Linear(3, 2)
    optimizers[0].add_param_group({"params": list(model[2].parameters())})
    weights = []
    for _ in range(3):
        step(accelerator, model, *optimizers)
        weights.append(model[2].weight.detach().clone())
    with averaged(model):
        expected = weights[0].lerp(weights[1], 0.5).lerp(weights[2], 0.5)
        torch.testing.assert_close(model[2].weight.detach(), expected)


def test_weights_of_another_shape_are_an_error() -> None:
    accelerator, _, _ = prepared()
    model = nn.Sequential(nn.Linear(3, 2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(accelerator, model, optimizer)
    model[0] = nn.Linear(3, 4)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(AccelError, match="0.weight of unit .* is laid out anew"):
        step(accelerator, model, optimizer)


def test_weights_that_are_copies_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared()
    (unit,) = accelerator.run.units
    offered = unit.hooks.model_state

    def copies(unit: Any) -> dict[str, Any]:
        return {name: full_leaf(leaf.shards[0][1].clone()) for name, leaf in offered(unit).items()}

    monkeypatch.setattr(unit.hooks, "model_state", copies)
    with pytest.raises(AccelError, match="offers copies of bias"):
        step(accelerator, model, optimizer)


def test_weights_that_are_held_in_parts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer = prepared()
    (unit,) = accelerator.run.units
    offered = unit.hooks.model_state

    def parts(unit: Any) -> dict[str, Any]:
        return {name.replace("weight", "weight#codes"): leaf for name, leaf in offered(unit).items()}

    monkeypatch.setattr(unit.hooks, "model_state", parts)
    with pytest.raises(AccelError, match="ema: weight of unit .* is trained, and held as several tensors"):
        step(accelerator, model, optimizer)


def test_the_average_may_lie_on_the_cpu() -> None:
    accelerator, model, optimizer = prepared(decay=0.5, device="cpu")
    step(accelerator, model, optimizer)
    average = accelerator.run.plugins["ema"].average_of(accelerator.run.units[0])  # type: ignore[attr-defined]
    assert {leaf.shards[0][1].device.type for leaf in average.leaves().values()} == {"cpu"}


# -- what is refused -------------------------------------------------------------------------------


def test_training_inside_is_refused() -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    for _ in range(3):
        step(accelerator, model, optimizer)
    before = model.weight.clone()
    with averaged(model), pytest.raises(AccelError, match="forward with gradients"):
        model(torch.ones(1, 3))
    loss = model(torch.ones(1, 3)).sum()
    accelerator.backward(loss)
    with averaged(model), pytest.raises(AccelError, match="step.. inside averaged"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_the_average_in_place_twice_is_refused() -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    for _ in range(3):
        step(accelerator, model, optimizer)
    before = model.weight.clone()
    with pytest.raises(AccelError, match="are its average already"), averaged(model), averaged(model):
        pass
    assert torch.equal(model.weight, before)


def test_a_save_and_a_load_inside_are_refused(tmp_path: Path) -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    for _ in range(3):
        step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "saved")
    before = model.weight.clone()
    with averaged(model), pytest.raises(CheckpointError, match="leave `with averaged"):
        accelerator.save_state(tmp_path / "inside")
    with averaged(model), pytest.raises(CheckpointError, match="leave `with averaged"):
        accelerator.load_state(tmp_path / "saved")
    assert torch.equal(model.weight, before)
    assert not (tmp_path / "inside").exists()


def test_a_model_without_an_average_is_named() -> None:
    with pytest.raises(AccelError, match="this Linear was not prepared"), averaged(nn.Linear(1, 1)):
        pass
    with pytest.raises(AccelError, match="without a model"), averaged():
        pass


def test_a_model_that_two_accelerators_train_has_no_one_average() -> None:
    first, model, _ = prepared()
    second = Accelerator(cpu=True, plugins=[EMAConfig()])
    second.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AccelError, match="2 Accelerators, each with an average"), averaged(model):
        pass
    first.free_memory()
    with averaged(model):
        pass


@pytest.mark.parametrize(
    "options", [{"decay": 1.5}, {"min_decay": 2}, {"min_decay": 0.9, "decay": 0.5}, {"inv_gamma": 0}]
)
def test_options_that_are_no_average_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"ema.{next(iter(options))}"):
        Accelerator(cpu=True, plugins=[EMAConfig(**options)])


def test_after_training_the_optimizer_steps_alone() -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    step(accelerator, model, optimizer)
    accelerator.free_memory()
    assert not optimizer.optimizer._optimizer_step_pre_hooks


# -- exceptions ------------------------------------------------------------------------------------


def test_weights_come_back_after_an_exception() -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    for _ in range(3):
        step(accelerator, model, optimizer)
    before = model.weight.clone()
    with pytest.raises(ZeroDivisionError), averaged(model):
        _ = 1 / 0
    assert torch.equal(model.weight, before)


def _give_other_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@pytest.mark.parametrize("move", [nn.Module.double, _give_other_memory])
def test_weights_come_back_where_they_moved_inside(move: Any) -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    for _ in range(3):
        step(accelerator, model, optimizer)
    before = model.weight.detach().clone()
    with averaged(model):
        move(model)
    torch.testing.assert_close(model.weight.detach(), before, check_dtype=False, rtol=0, atol=0)


def test_another_parameter_at_the_end_than_at_the_beginning_is_an_error() -> None:
    accelerator, model, optimizer = prepared(decay=0.5)
    for _ in range(3):
        step(accelerator, model, optimizer)
    trained = model.weight
    before = trained.clone()
    with pytest.raises(AccelError, match="weight of unit .* is another parameter"), averaged(model):
        model.weight = nn.Parameter(model.weight.detach().clone())
    assert torch.equal(trained, before)
    model.weight = trained
    with averaged(model):
        model.weight = nn.Parameter(torch.zeros_like(before))
        model.weight = trained
    assert torch.equal(model.weight, before)


def test_weights_come_back_after_ctrl_c_at_any_moment(run_processes) -> None:
    assert run_processes(interrupted, world=1) == [(True, True)]


def interrupted() -> tuple[bool, bool]:
    """Return whether weights and average were whole after each of many interrupts, and some hit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    accelerator = Accelerator(cpu=True, plugins=[EMAConfig(decay=0.5)])
    model = nn.Sequential(*[nn.Linear(9, 9) for _ in range(40)])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(torch.stack([layer.weight.square().sum() for layer in model]).sum())
        optimizer.step()
        optimizer.zero_grad()
    before = [parameter.clone() for parameter in model.parameters()]
    with averaged(model):
        average = [parameter.clone() for parameter in model.parameters()]
        assert not torch.equal(average[0], before[0])
    start = time.perf_counter()
    for _ in range(10):
        with averaged(model):
            pass
    each, hits, good = (time.perf_counter() - start) / 10, 0, True
    for number in range(300):
        timer = threading.Timer(each * number / 250, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            with averaged(model):
                pass
            timer.join()
        except KeyboardInterrupt:
            hits += 1
        timer.join()
        good &= all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        with averaged(model):
            good &= all(torch.equal(*pair) for pair in zip(model.parameters(), average, strict=True))
    return good, hits > 100
