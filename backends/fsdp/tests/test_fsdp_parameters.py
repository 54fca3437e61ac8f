"""What holds a parameter from before `prepare`, or hooks one, is right or told: nothing is lost silently."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_problem import accelerator, distance, loss_of, net, plugin
from torch import Tensor, nn

from accel_core import AccelError, ConfigError
from accel_fsdp import FullyShardedDataParallelPlugin

VERSIONS = (1, 2)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6), torch.zeros(4, dtype=torch.long)


def said_by(action: Callable[[], Any]) -> str | None:
    try:
        action()
    except AccelError as error:
        return str(error)
    return None


def never_prepared(version: int) -> tuple[str | None, float]:
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = run.prepare(model)
    said = said_by(lambda: run.backward(loss_of(model, *batch())))
    optimizer.step()
    moved = distance(dict(run.get_state_dict(model, rank0_only=False)), before)
    run.end_training()
    return said, moved


def test_an_optimizer_that_was_never_prepared_steps_or_says_so(run_processes) -> None:
    for said, moved in run_processes(never_prepared, 1):
        assert said is None
        assert moved > 0
    for said, _ in run_processes(never_prepared, 2):
        assert said is not None
        assert "something still holds those from before" in said
        assert "accelerator.prepare(model, optimizer)" in said.splitlines()[-1]


def prepared_late() -> float:
    run = accelerator(plugin("mlp", 2))
    model = net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = run.prepare(model)
    optimizer = run.prepare(optimizer)
    run.backward(loss_of(model, *batch()))
    optimizer.step()
    moved = distance(dict(run.get_state_dict(model, rank0_only=False)), before)
    run.end_training()
    return moved


def test_an_optimizer_may_be_prepared_later(run_processes) -> None:
    assert min(run_processes(prepared_late)) > 0


def hooked_before(version: int, kind: str) -> str | None:
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    getattr(model[3].weight, kind)(lambda _: None)
    said = said_by(lambda: run.prepare(model))
    run.end_training()
    return said


@pytest.mark.full
@pytest.mark.parametrize(
    ("version", "kind"),
    [(1, "register_hook"), (2, "register_hook"), (1, "register_post_accumulate_grad_hook")],
)
def test_hooks_that_would_never_be_called_are_refused_by_name(version: int, kind: str, run_processes) -> None:
    for said in run_processes(hooked_before, version, kind):
        assert said is not None
        assert said.startswith(f"3.weight has a hook ({kind})")
        assert "register_full_backward_hook" in said.splitlines()[-1]


def stepped_in_backward() -> float:
    """An optimizer for each parameter, which steps as soon as its gradient is reduced."""
    run = accelerator(plugin("mlp", 2))
    model, alone = net("mlp"), net("mlp")

    def descend(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for each in (*model.parameters(), *alone.parameters()):
        each.register_post_accumulate_grad_hook(descend)
    model = run.prepare(model)
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    y = batch()[1]
    for _ in range(3):
        run.backward(loss_of(model, x[run.process_index], y))
        loss_of(alone, x.flatten(0, 1), torch.cat([y, y])).backward()
    gap = distance(dict(run.get_state_dict(model, rank0_only=False)), alone.state_dict())
    run.end_training()
    return gap


@pytest.mark.full
def test_hooks_after_accumulation_see_reduced_gradients_of_version_2(run_processes) -> None:
    assert max(run_processes(stepped_in_backward)) < 1e-6


def prepared_again(version: int) -> str:
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    run.prepare(model)
    run.free_memory()
    with pytest.raises(ConfigError) as caught:
        run.prepare(model)
    run.end_training()
    return str(caught.value)


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_that_was_sharded_before_is_refused(version: int, run_processes) -> None:
    for said in run_processes(prepared_again, version):
        assert "MLP was sharded by an earlier prepare" in said
        assert said.splitlines()[-1].startswith("build it anew")


def penalised() -> tuple[str | None, float]:
    run = accelerator(plugin("mlp", 2))
    model = run.prepare(net("mlp"))
    x = batch()[0].requires_grad_()
    total = model(x).sum()
    said = said_by(lambda: torch.autograd.grad(total, x, create_graph=True))
    run.end_training()
    run = accelerator(plugin("mlp", 2))
    model = run.prepare(net("mlp"))
    again = model(x).sum()
    run.backward(again, retain_graph=True)
    run.backward(again)
    found = model[0].weight.grad.full_tensor().sum().item()
    run.end_training()
    return said, found


@pytest.mark.full
def test_gradients_of_gradients_are_refused_and_two_backwards_add_up(run_processes) -> None:
    alone = net("mlp")
    (alone(batch()[0]).sum() * 2).backward()
    for said, found in run_processes(penalised):
        assert said is not None
        assert said.splitlines()[-1] == "prepare this model with strategy ddp"
        assert found == pytest.approx(alone[0].weight.grad.sum().item(), rel=1e-5)


ODD_DTYPES = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex64)


def odd_buffers(version: int, folder: str) -> list[list[bool]]:
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    for number, dtype in enumerate(ODD_DTYPES):
        model.register_buffer(f"odd{number}", torch.full((3,), run.process_index + 1).to(dtype))
    model = run.prepare(model)
    run.save_state(folder)
    buffers = [dict(run.unwrap_model(model).named_buffers())[f"odd{n}"] for n in range(len(ODD_DTYPES))]
    of_rank0 = [torch.full((3,), 1).to(dtype) for dtype in ODD_DTYPES]
    first = [same_bytes(*pair) for pair in zip(buffers, of_rank0, strict=True)]
    for buffer in buffers:
        buffer.zero_()
    run.load_state(folder)
    again = [same_bytes(*pair) for pair in zip(buffers, of_rank0, strict=True)]
    run.end_training()
    return [first, again]


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_buffers_of_dtypes_that_a_group_does_not_carry_are_those_of_rank_0(
    version: int, tmp_path: Path, run_processes
) -> None:
    for first, again in run_processes(odd_buffers, version, str(tmp_path / "saved")):
        assert all(first)
        assert all(again)


def loaded_whole() -> float:
    run = accelerator(plugin("mlp", 2))
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    wanted = {name: tensor + 1 for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.backward(loss_of(model, *batch()))
    optimizer.step()
    with run.full_parameters(model, writeback=True):
        model.load_state_dict(wanted)
    found = distance(dict(run.get_state_dict(model, rank0_only=False)), wanted)
    run.backward(loss_of(model, *batch()))
    optimizer.step()
    run.end_training()
    return found


def test_whole_weights_are_loaded_inside_full_parameters(run_processes) -> None:
    """Torch looked for a shard in what was loaded, and the model was of no use from then on."""
    assert run_processes(loaded_whole) == [0, 0]


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "to the device": lambda model: model.to("cpu"),
    "to float32": lambda model: model.float(),
}


class Scaled(nn.Module):
    """Has a weight of its own, which a forward with a graph leaves gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = net("mlp"), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale.mean()


def converted(version: int, kind: str) -> list[str | None]:
    """What a conversion says of a fresh model, one that has weights gathered, and one that was stepped."""
    found = []
    for stage in ("fresh", "gathered", "stepped"):
        run = accelerator(plugin("mlp", version))
        model, optimizer = run.prepare(given := Scaled(), torch.optim.SGD(given.parameters(), lr=0.1))
        if stage == "gathered":
            model(batch()[0])
        if stage == "stepped":
            run.backward(loss_of(model, *batch()))
            optimizer.step()
        found.append(said_by(partial(CONVERSIONS[kind], run.unwrap_model(model))))
        after = run.get_state_dict(model, rank0_only=False)
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        run.backward(loss_of(model, *batch()))
        optimizer.step()
        assert distance(dict(run.get_state_dict(model, rank0_only=False)), after) > 0
        run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_conversion_that_changes_nothing_passes(version: int, kind: str, run_processes) -> None:
    for found in run_processes(converted, version, kind):
        assert found == [None, None, None]


def converted_when_released() -> set[torch.dtype]:
    run = accelerator(plugin("mlp", 2))
    model = run.prepare(net("mlp"))
    run.backward(loss_of(model, *batch()))
    run.free_memory()
    found = {tensor.dtype for tensor in model.double().state_dict().values()}
    run.end_training()
    return found


@pytest.mark.full
def test_a_model_that_was_released_may_be_converted(run_processes) -> None:
    assert run_processes(converted_when_released) == [{torch.float64}] * 2


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def of_numbers_that_cannot_be_sharded(version: int) -> list[str | None]:
    run = accelerator(FullyShardedDataParallelPlugin(fsdp_version=version))
    models = Complex(), nn.Sequential(nn.Embedding(5, 2, sparse=True)), nn.EmbeddingBag(5, 2, sparse=True)
    run.prepare(nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True).requires_grad_(False)))
    return [said_by(partial(run.prepare, model)) for model in models]


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_complex_weights_and_sparse_gradients_are_refused_by_name(version: int, run_processes) -> None:
    for numbers, nested, alone in run_processes(of_numbers_that_cannot_be_sharded, version):
        assert numbers is not None
        assert nested is not None
        assert alone is not None
        assert (
            "phase, [3]: torch's optimizers step sharded torch.complex64 wrongly\nmake it two real" in numbers
        )
        assert "0.weight, [5, 2]: sparse gradients (sparse=True) cannot be sharded\nmake the module" in nested
        assert alone.startswith("weight, [5, 2]: sparse gradients")
