"""Whole weights out of parts: exported, for a moment, averaged, saved and resumed elsewhere."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_problem import (
    accelerator,
    batch,
    distance,
    loss_of,
    net,
    optimizer_of,
    plugin,
    steps_of,
    train_plainly,
)
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from accel_core import AccelError

VERSIONS = (1, 2)


def started(version: int, kind: str = "gpt", **options: Any) -> tuple[Any, nn.Module, Any]:
    run = accelerator(plugin(kind, version, **options))
    model = net(kind, seed=run.process_index)
    model, optimizer = run.prepare(model, optimizer_of(model))
    return run, model, optimizer


def after_evaluation(version: int, strategy: str) -> dict[str, torch.Tensor]:
    run, model, optimizer = started(version, sharding_strategy=strategy)
    for _ in steps_of(run, model, optimizer, "gpt", range(2)):
        model.eval()
        with torch.no_grad():
            model(batch("gpt", 0)[0])
        model.train()
        if version == 2:
            model(batch("gpt", 0)[0])  # a forward whose backward never comes
    found = dict(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return tree_map(torch.clone, found)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2-FULL_SHARD")
def test_evaluating_between_steps_changes_nothing(version: int, strategy: str, run_processes) -> None:
    for found in run_processes(after_evaluation, version, strategy):
        assert distance(found, train_plainly("gpt", 2)[1]) < 1e-5


def streamed(version: int) -> tuple[list[str], set[torch.dtype], bool]:
    run, model, _ = started(version)
    unit = run.run.units[0]
    found = dict(unit.hooks.iter_weights(unit, torch.bfloat16, None))
    state = run.get_state_dict(model, rank0_only=False)
    tied = torch.equal(state["head.weight"], state["tokens.weight"])
    run.end_training()
    return sorted(found), {tensor.dtype for tensor in found.values()}, tied


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_come_one_by_one_under_the_models_names(version: int, run_processes) -> None:
    names = sorted(name for name, _ in net("gpt").named_parameters())
    for found, dtypes, tied in run_processes(streamed, version):
        assert found == names
        assert dtypes == {torch.bfloat16}
        assert tied


def for_a_moment(version: int, writeback: bool) -> tuple[tuple[int, ...], float, bool]:
    run, model, _ = started(version, "mlp")
    before = run.get_state_dict(model, rank0_only=False)["4.weight"].clone()
    inner = run.unwrap_model(model)
    with run.full_parameters(model, ["4.weight", "1.up.weight"], writeback=writeback):
        shape = tuple(inner[4].weight.shape)
        with torch.no_grad():
            inner[4].weight.add_(1.0)
    change = (run.get_state_dict(model, rank0_only=False)["4.weight"] - before).mean().item()
    kept = torch.equal(run.get_state_dict(model, rank0_only=False)["4.weight"], before)
    run.end_training()
    return shape, round(change, 4), kept


def said_of_stand_ins(version: int, folder: str) -> list[str]:
    """What is said when what has a sharded model, a part or a weight of it is asked for whole weights."""
    run, model, _ = started(version)
    said, tied = [], nn.Linear(1, 1)
    tied.weight = next(model.parameters())
    for stand_in in (nn.ModuleList([model]), [*model.modules()][-1], tied):
        for ask in (
            lambda: run.get_state_dict(stand_in, rank0_only=False),  # noqa: B023
            lambda: run.save_model(stand_in, folder, safe_serialization=False),  # noqa: B023
            lambda: run.full_parameters(stand_in).__enter__(),  # noqa: B023
        ):
            try:
                ask()
                said.append("nothing")
            except AccelError as error:
                said.append(str(error))
    run.end_training()
    return said


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_whole_weights_of_what_stands_for_a_sharded_model_are_refused(
    version: int, tmp_path: Path, run_processes
) -> None:
    for said in run_processes(said_of_stand_ins, version, str(tmp_path)):
        assert all("of which this rank has parts" in each for each in said)


def freed(version: int) -> bool:
    run, model, optimizer = started(version, "mlp")
    held = weakref.ref(run.unwrap_model(model))
    for _ in steps_of(run, model, optimizer, "mlp", range(2)):
        pass
    model, optimizer = run.free_memory(model, optimizer)
    gc.collect()
    return held() is None


@pytest.mark.parametrize("version", VERSIONS)
def test_free_memory_lets_a_model_go(version: int, run_processes) -> None:
    assert run_processes(freed, version) == [True, True]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_parameters_are_whole_for_a_moment_and_keep_what_is_written_if_asked(
    version: int, run_processes
) -> None:
    assert run_processes(for_a_moment, version, True) == [((3, 16), 1.0, False)] * 2
    assert run_processes(for_a_moment, version, False) == [((3, 16), 0.0, True)] * 2


def averaged() -> float:
    run, model, optimizer = started(2, "mlp")
    average = [p.detach().clone() for p in model.parameters()]
    alone = net("mlp")
    theirs = [p.detach().clone() for p in alone.parameters()]
    stepper = optimizer_of(alone)
    for step, _ in enumerate(steps_of(run, model, optimizer, "mlp", range(4))):
        torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
        loss_of(alone, *batch("mlp", step)).backward()
        stepper.step()
        stepper.zero_grad()
        torch._foreach_lerp_(theirs, [p.detach() for p in alone.parameters()], 0.1)
    gap = max((a.full_tensor() - t).abs().max().item() for a, t in zip(average, theirs, strict=True))
    run.end_training()
    return gap


@pytest.mark.full
def test_an_average_of_the_parts_is_the_part_of_the_average(run_processes) -> None:
    assert max(run_processes(averaged)) < 1e-5


def adapters(version: int) -> tuple[float, list[bool]]:
    run = accelerator(plugin("mlp", version))
    model = _with_adapters()
    model, optimizer = run.prepare(model, optimizer_of(model))
    list(steps_of(run, model, optimizer, "mlp", range(3)))
    found = run.get_state_dict(model, rank0_only=False)
    alone = _with_adapters()
    stepper = optimizer_of(alone)
    for step in range(3):
        loss_of(alone, *batch("mlp", step)).backward()
        stepper.step()
        stepper.zero_grad()
    gap = distance(dict(found), alone.state_dict())
    run.end_training()
    return gap, [p.requires_grad for p in alone.parameters()]


def _with_adapters() -> nn.Module:
    model = net("mlp")
    model.requires_grad_(False)
    for block in (model[1], model[2]):
        block.up = nn.Sequential(block.up, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False))
    return model


@pytest.mark.parametrize("version", VERSIONS)
def test_adapters_train_beside_frozen_weights(version: int, run_processes) -> None:
    for gap, trains in run_processes(adapters, version):
        assert gap < 1e-5
        assert {*trains} == {True, False}


def frozen_within(version: int, frozen: str) -> float:
    run = accelerator(plugin("mlp", version), gradient_accumulation_steps=2)
    model, alone = net("mlp"), net("mlp")
    stepper = optimizer_of(alone)
    model, optimizer = run.prepare(model, optimizer_of(model))
    share = slice(4 * run.process_index, 4 * run.process_index + 4)
    for step in range(4):
        x, y = batch("mlp", step, run.num_processes)
        with run.accumulate(model):
            run.backward(loss_of(model, x[share], y[share]))
            optimizer.step()
            optimizer.zero_grad()
        (loss_of(alone, x, y) / 2).backward()
        if step % 2 == 0:
            for each in (run.unwrap_model(model), alone):
                each.get_submodule(frozen).requires_grad_(False)
            with run.no_sync(model) if frozen else nullcontext():  # nothing to reduce where all is frozen
                loss_of(model, x[share].clone().requires_grad_(), y[share]).backward()
            loss_of(alone, x.clone().requires_grad_(), y).backward()
            for each in (run.unwrap_model(model), alone):
                each.requires_grad_(True)
        else:
            stepper.step()
            stepper.zero_grad()
    gap = distance(dict(run.get_state_dict(model, rank0_only=False)), alone.state_dict())
    run.end_training()
    return gap


@pytest.mark.full
@pytest.mark.parametrize("frozen", ["", "1"])
@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_frozen_for_a_pass_within_a_window_keeps_its_gradients(
    version: int, frozen: str, run_processes
) -> None:
    for world in (1, 2):
        assert max(run_processes(frozen_within, version, frozen, world=world)) < 1e-5


def distilled(version: int, strategy: str) -> tuple[float, bool]:
    run = accelerator(plugin("mlp", version))
    teacher, student = net("mlp", 7).requires_grad_(False), net("mlp")
    teacher = run.prepare(teacher, strategy=strategy, name="teacher")
    student, optimizer = run.prepare(student, optimizer_of(student))
    alone, stepper, guide = net("mlp"), None, net("mlp", 7)
    stepper = optimizer_of(alone)
    for step in range(4):
        x, _ = batch("mlp", step)
        mine = x[run.process_index * 4 :][:4]
        run.backward(F.mse_loss(student(mine), teacher(mine)))
        F.mse_loss(alone(x), guide(x).detach()).backward()
        for each in (optimizer, stepper):
            each.step()
            each.zero_grad()
    gap = distance(dict(run.get_state_dict(student, rank0_only=False)), alone.state_dict())
    whole = all(p.shape == q.shape for p, q in zip(teacher.parameters(), guide.parameters(), strict=True))
    run.end_training()
    return gap, whole


@pytest.mark.parametrize("version", VERSIONS)
def test_a_whole_teacher_trains_a_student_in_parts(version: int, run_processes) -> None:
    for gap, whole in run_processes(distilled, version, "single"):
        assert gap < 1e-5
        assert whole


def dictionaries(kind: str | None, version: int) -> tuple[str, bool]:
    run, model, _ = started(version, "mlp", state_dict_type=kind)
    state = model.state_dict()
    before = run.get_state_dict(model, rank0_only=False)["4.weight"].clone()
    model.load_state_dict(state)
    same = torch.equal(run.get_state_dict(model, rank0_only=False)["4.weight"], before)
    name = next(name for name in state if name.endswith("4.weight"))
    run.end_training()
    return type(state[name]).__name__, same


def test_state_dict_gives_what_its_type_says_and_takes_it_back(run_processes) -> None:
    assert run_processes(dictionaries, None, 2) == [("DTensor", True)] * 2
    assert run_processes(dictionaries, "sharded_state_dict", 2) == [("DTensor", True)] * 2
    assert run_processes(dictionaries, "full_state_dict", 2) == [("Tensor", True)] * 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "given"), [("FULL_STATE_DICT", "Tensor"), ("SHARDED_STATE_DICT", "DTensor")]
)
def test_so_does_that_of_version_1(kind: str, given: str, run_processes) -> None:
    assert run_processes(dictionaries, kind, 1) == [(given, True)] * 2


def on_one_rank() -> list[str]:
    configs = {
        "state_dict_config": FullStateDictConfig(rank0_only=True),
        "optim_state_dict_config": FullOptimStateDictConfig(rank0_only=True),
    }
    run, model, _ = started(1, "mlp", state_dict_type="FULL_STATE_DICT", **configs)
    found = list(model.state_dict())
    run.end_training()
    return found


@pytest.mark.full
def test_configs_of_torch_say_where_version_1_gives_whole_weights(run_processes) -> None:
    first, second = run_processes(on_one_rank)
    assert first == list(net("mlp").state_dict())
    assert second == []


def saved(folder: str, version: int) -> list[float]:
    run, model, optimizer = started(version)
    list(steps_of(run, model, optimizer, "gpt", range(2)))
    run.save_state(folder, wait=False)
    after = list(steps_of(run, model, optimizer, "gpt", range(2, 5)))
    run.save_model(model, f"{folder}-weights")
    run.end_training()
    return after


def resumed(folder: str, version: int) -> list[float]:
    run, model, optimizer = started(version)
    run.load_state(folder)
    after = list(steps_of(run, model, optimizer, "gpt", range(2, 5)))
    run.end_training()
    return after


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_a_save_that_does_not_wait_is_resumed_by_the_other_version(
    tmp_path: Path, version: int, run_processes
) -> None:
    expected = run_processes(saved, str(tmp_path / "saved"), version)[0]
    found = run_processes(resumed, str(tmp_path / "saved"), 3 - version)[0]
    assert found == pytest.approx(expected, abs=1e-5)
