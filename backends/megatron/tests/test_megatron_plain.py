"""Any model where each rank has all of it: plain SGD steps, to the digit; its buffers; what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import accelerator, batches, gpt2
from torch import nn

from accel_core import AccelError
from accel_megatron.stepping import Stepper


def stepped(strategy: str, options: dict[str, Any], items: bool) -> list[float]:
    """Weights and gradient norms of SGD in windows of four, of a model whose gradient is its input."""
    ours = accelerator(strategy=strategy, **options)
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    batches = [torch.full((2, 3), float(number % 4 + 1)) for number in range(8)]
    for window in ours.windows(batches, model, items=len if items else None, size=4):
        for batch in window:
            losses = model(batch)
            ours.backward(losses.sum() if items else losses.mean())
            norm = ours.clip_grad_norm_(model.parameters(), 1e9)
            found += [] if norm is None else [float(norm)]
            optimizer.step()
            optimizer.zero_grad()
    return found + [float(each) for name in ("weight", "bias") for each in whole(ours, model)[name].flatten()]


def whole(ours: Any, model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = ours.get_state_dict(model, rank0_only=False)
    return found


@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("options", [{}, {"other_megatron_args": {"overlap_grad_reduce": True}}])
@pytest.mark.by_default
def test_a_plain_loop_steps_by_the_gradients_of_native(
    options: dict[str, Any], items: bool, run_processes
) -> None:
    (wanted,) = run_processes(stepped, "single", {}, items, world=1)
    assert wanted[-4:] == [-5.0, -5.0, -5.0, wanted[-1]]  # two windows of a mean input of 2.5
    for found in run_processes(stepped, "megatron", options, items):
        assert found == wanted


def cleared_by(strategy: str, clear: str) -> list[float] | str:
    """Weights of two steps of SGD, or the error, where gradients are cleared by `clear`."""
    ours = accelerator(strategy=strategy)
    torch.manual_seed(0)
    given = nn.Linear(3, 1)
    model, optimizer = ours.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    for number in range(1, 3):
        try:
            ours.backward(model(torch.full((2, 3), float(number))).square().mean())
            optimizer.step()
        except AccelError as error:
            return str(error)
        clears = {"model": model.zero_grad, "model to 0": partial(model.zero_grad, set_to_none=False)}
        clears.get(clear, lambda: None)()
    return [float(each) for each in whole(ours, model)["weight"].flatten()]


@pytest.mark.parametrize("clear", ["model", "model to 0"])
def test_zero_grad_of_the_model_clears_gradients(clear: str, run_processes) -> None:
    (wanted,) = run_processes(cleared_by, "single", clear, world=1)
    for found in run_processes(cleared_by, "megatron", clear):
        assert found == pytest.approx(wanted, abs=1e-6)


class SignDescent(torch.optim.Optimizer):
    """Another library's optimizer, which counts its steps in the group."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for each in group["params"]:
                each.sub_(group["lr"] / group["count"] * each.grad.sign())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adagrad": torch.optim.Adagrad,
    "AdamW with amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9),
    "SignDescent": SignDescent,
}


def stepped_by(strategy: str, name: str, folder: str) -> tuple[list[float], list[float], Any]:
    """Weights after four steps, of which two follow a load; learning rates; a count in the group."""
    for half in range(2):
        ours = accelerator(strategy=strategy)
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = OPTIMIZERS[name](model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, schedule = ours.prepare(model, optimizer, schedule)
        if half:
            ours.load_state(folder)
        for number in range(2 * half, 2 * half + 2):
            ours.backward(model(torch.full((2, 3), float(number + 1))).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not half:
            ours.save_state(folder)
            ours.end_training()
    weights = [float(each) for name in ("weight", "bias") for each in whole(ours, model)[name].flatten()]
    return weights, schedule.get_last_lr(), optimizer.param_groups[0].get("count")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.by_default("RMSprop", "SignDescent")
def test_an_optimizer_that_megatron_core_lacks_steps_as_in_one_process(
    name: str, run_processes, tmp_path: Path
) -> None:
    (wanted,) = run_processes(stepped_by, "single", name, str(tmp_path / "single"), world=1)
    for weights, rates, count in run_processes(stepped_by, "megatron", name, str(tmp_path / "megatron")):
        assert weights == pytest.approx(wanted[0], abs=1e-6)
        assert rates == wanted[1]
        assert count == wanted[2]


@pytest.mark.full
def test_gradients_of_a_step_that_are_not_cleared_are_refused(run_processes) -> None:
    """megatron-core would reduce what is reduced already, and add it to itself."""
    for said in run_processes(cleared_by, "megatron", "nothing"):
        assert said.startswith("megatron: the last clip, unscale or step has reduced the gradients")


def clipped_before_another_backward(steps: bool) -> tuple[str, bool]:
    """Return what clipping again or a step says then, and if weights move after gradients are cleared."""
    ours = accelerator()
    model: Any = nn.Linear(2, 1, bias=False)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = whole(ours, model)["weight"].clone()

    def backward() -> None:
        ours.backward(model(torch.ones(1, 2)).sum())

    backward()
    ours.clip_grad_norm_(model.parameters(), 1.0)
    backward()
    with pytest.raises(AccelError) as caught:
        optimizer.step() if steps else ours.clip_grad_norm_(model.parameters(), 1.0)
    assert torch.equal(whole(ours, model)["weight"], before)
    optimizer.zero_grad()
    backward()
    optimizer.step()
    return str(caught.value), not torch.equal(whole(ours, model)["weight"], before)


@pytest.mark.full
@pytest.mark.parametrize("steps", [True, False])
def test_a_backward_after_clipping_is_refused(steps: bool, run_processes) -> None:
    for said, moves in run_processes(clipped_before_another_backward, steps):
        assert said.startswith("megatron: the last clip, unscale or step has reduced the gradients")
        assert moves


def by_one_rank() -> list[float]:
    """Weights after a step for which only rank 0 did a backward."""
    ours = accelerator()
    model: Any = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if ours.is_main_process:
        ours.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    found: list[float] = whole(ours, model)["weight"].flatten().tolist()
    return found


@pytest.mark.full
def test_a_rank_without_a_backward_adds_zeros_to_those_of_others(run_processes) -> None:
    assert run_processes(by_one_rank) == [[-0.5, -0.5]] * 2


class Buffers(nn.Module):
    """State of many dtypes that differs by rank, which forward does not read."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        values = {"real": 3.0 + 30.0 * rank, "int": 1002 + rank, "small": 5 + rank, "flag": rank == 0}
        dtypes = {"real": torch.float32, "int": torch.int64, "small": torch.int16, "flag": torch.bool}
        self.start = {name: torch.tensor(value, dtype=dtypes[name]) for name, value in values.items()}
        self.start["complex"] = torch.tensor([1 + 2j * rank])
        for name, value in self.start.items():
            self.register_buffer(name, torch.zeros_like(value))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for name, value in self.start.items():
            getattr(self, name).copy_(value)
        return (self.weight * batch).sum()


def buffered(precision: str) -> dict[str, Any]:
    ours = accelerator(mixed_precision=precision)
    model = Buffers(ours.process_index)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    ours.backward(model(torch.ones(2)))
    optimizer.step()
    return {name: (str(each.dtype), each.tolist()) for name, each in whole(ours, model).items()}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_buffers_are_rank_zeros_in_their_own_dtype(precision: str, run_processes) -> None:
    dtype = {"no": "torch.float32", "bf16": "torch.bfloat16"}[precision]  # forward's copy of the weights
    for found in run_processes(buffered, precision):
        assert found.pop("weight") == (dtype, [0.0, 0.0])
        assert found.pop("real") == (dtype, 3.0)
        assert found == {
            "int": ("torch.int64", 1002),
            "small": ("torch.int16", 5),
            "flag": ("torch.bool", True),
            "complex": ("torch.complex64", [1 + 0j]),
        }


class Awkward(nn.Module):
    """A convolution in another order of memory, a transposed matrix, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(2, 36).t())
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.scale * self.conv(images).flatten(1) @ self.matrix


def remembered(strategy: str, options: dict[str, Any], folder: str, steps: int) -> dict[str, torch.Tensor]:
    """Weights after some steps, from the state in `folder` if there is one, which is saved there."""
    ours = accelerator(strategy=strategy, **options)
    model = Awkward()
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3))
    if Path(folder).exists():
        ours.load_state(folder)
    images = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)
    for _ in range(steps):
        ours.backward(model(images).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if not Path(folder).exists():
        ours.save_state(folder)
    return {name: each.clone() for name, each in whole(ours, model).items()}


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": True}])
@pytest.mark.by_default
def test_parameters_of_any_order_and_size_step_and_resume(
    tmp_path: Path, options: dict[str, Any], run_processes
) -> None:
    (wanted,) = run_processes(remembered, "single", {}, str(tmp_path / "none"), 4, world=1)
    run_processes(remembered, "megatron", options, str(tmp_path / "two"), 2)
    found = run_processes(remembered, "megatron", options, str(tmp_path / "two"), 2)
    found += run_processes(remembered, "single", {}, str(tmp_path / "two"), 2, world=1)
    for each in found:
        torch.testing.assert_close(each, wanted)


def answered(optimizes: bool) -> str:
    ours = accelerator(mixed_precision="bf16")
    model = nn.Linear(2, 2)
    given = [model, torch.optim.SGD(model.parameters(), lr=0.1)] if optimizes else [model, None]
    return str(ours.prepare(*given)[0](torch.ones(2, 2)).dtype)


@pytest.mark.parametrize("optimizes", [False, True])
def test_a_model_in_16_bits_answers_in_float32(optimizes: bool, run_processes) -> None:
    assert run_processes(answered, optimizes, world=1) == ["torch.float32"]


def frozen(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)


def unfrozen(model: Any, optimizer: Any) -> None:
    model[1].bias.requires_grad_()


def replaced(model: Any, optimizer: Any) -> None:
    model[0] = nn.Linear(4, 4)


def regrouped(model: Any, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def added(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


CHANGES = {each.__name__: each for each in (frozen, unfrozen, replaced, regrouped, added)}
SAID = {
    "frozen": "2 parameter(s) were trained when the model was prepared and are frozen now (0.weight)",
    "unfrozen": "1 parameter(s) were frozen when the model was prepared and are trained now (1.bias)",
    "replaced": "0.weight was replaced or added",
    "regrouped": "parameters were added to the optimizer's groups, taken out or moved to others",
    "added": "add_param_group of an optimizer",
}


def changed(change: str) -> str:
    ours, model = accelerator(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    groups = [{"params": model[0].parameters()}, {"params": [model[1].weight], "lr": 0.01}]
    model, optimizer = ours.prepare(model, torch.optim.AdamW(groups, lr=0.1))

    said = "nothing"
    for changes in (lambda *_: None, CHANGES[change]):
        try:
            changes(ours.unwrap_model(model), optimizer)
            ours.backward(model(torch.ones(2, 4)).square().sum())
        except AccelError as error:
            said = str(error)
        else:
            optimizer.step()
            optimizer.zero_grad()
    return said


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_megatron_core_would_not_follow_is_refused(change: str, run_processes) -> None:
    for said in run_processes(changed, change):
        assert said.startswith("strategy 'megatron' cannot follow a change to unit")
        assert SAID[change] in said


def converted_and_frozen() -> None:
    ours, model = accelerator(), gpt2()
    model, _ = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ours.unwrap_model(model).transformer.wte.requires_grad_(False)
    with pytest.raises(AccelError, match="frozen now"):
        ours.backward(model(**batches(1)[0]).loss)


@pytest.mark.full
def test_a_converted_model_whose_weights_are_frozen_after_prepare_is_refused(run_processes) -> None:
    run_processes(converted_and_frozen, world=1)


def trained_in_turn() -> tuple[bool, list[bool]]:
    """True if a layer trains after another one did; which parameters train after a failed prepare."""
    ours, model = accelerator(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ours.prepare(model, torch.optim.AdamW(model[1].parameters(), lr=0.1))
    ours.free_memory()
    before = model[0].weight.detach().clone()
    prepared, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ours.backward(prepared(torch.ones(2, 4)).sum())
    optimizer.step()
    moved = not torch.equal(whole(ours, prepared)["0.weight"], before)
    ours.free_memory()
    Stepper.make = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ours.prepare(model, torch.optim.AdamW(model[1].parameters(), lr=0.1))
    return moved, [each.requires_grad for each in model.parameters()]


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.full
def test_layers_that_no_optimizer_has_are_frozen_no_longer_than_they_are_prepared(run_processes) -> None:
    for moved, trains in run_processes(trained_in_turn):
        assert moved
        assert trains == [True] * 4


def loaded(distributed: bool) -> tuple[Any, Any, Any]:
    """Weights in 16 bits that are loaded after `prepare`; those that are saved then; those after a step."""
    ours = accelerator(mixed_precision="bf16", use_distributed_optimizer=distributed)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.0))
    torch.manual_seed(7)
    best = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16().state_dict()
    copied = copy.deepcopy(ours.unwrap_model(model))
    ours.unwrap_model(model).load_state_dict(best)
    copied.load_state_dict({name: torch.zeros_like(each) for name, each in best.items()})
    saved = {name: each.clone() for name, each in whole(ours, model).items()}
    ours.backward(model(torch.ones(2, 4)).square().sum())
    optimizer.step()
    return best, saved, {name: each.clone() for name, each in whole(ours, model).items()}


@pytest.mark.full
@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_starts_from_loaded_weights_in_16_bits(distributed: bool, run_processes) -> None:
    for best, saved, stepped in run_processes(loaded, distributed):
        torch.testing.assert_close(saved, dict(best), rtol=0, atol=0)
        torch.testing.assert_close(stepped, dict(best), rtol=0, atol=0)


def loaded_in_vain() -> tuple[str, str]:
    """What is said of weights and of an optimizer's state that are loaded after `prepare`."""
    ours, model = accelerator(), gpt2()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="While copying the parameter") as caught:
        ours.unwrap_model(model).load_state_dict(weights)
    with pytest.raises(AccelError) as refused:
        optimizer.load_state_dict(optimizer.state_dict())
    return str(caught.value), str(refused.value)


@pytest.mark.full
def test_what_would_be_loaded_in_vain_is_an_error(run_processes) -> None:
    ((by_torch, by_us),) = run_processes(loaded_in_vain, world=1)
    assert "transformer.wte.weight" in by_torch
    assert by_us.startswith("megatron: optimizer.load_state_dict after prepare")


def cleared_between(zero_grad: bool) -> str:
    ours, model = accelerator(), gpt2()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(**batches(1)[0]).loss
    if zero_grad:
        optimizer.zero_grad()
    try:
        loss.backward()
    except AccelError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_gradients_of_a_converted_model_are_not_cleared_before_its_backward(run_processes) -> None:
    """They come with its forward, and the step would be one by zeros."""
    (said,) = run_processes(cleared_between, True, world=1)
    assert said.startswith("megatron: zero_grad() came between forward and backward")
    assert run_processes(cleared_between, False, world=1) == [""]


def hooked(hook: str, strategy: str, options: dict[str, Any]) -> Any:
    """Weights of AdamW steps around which a hook of the optimizer is called."""
    ours = accelerator(strategy=strategy, **options)
    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": given[0].parameters()}, {"params": given[1].parameters(), "lr": 0.01}]
    model, optimizer = ours.prepare(given, torch.optim.AdamW(groups, lr=0.1, eps=1e-2))
    for number in range(3):
        if number == 1:
            HOOKS[hook](optimizer.optimizer)
        ours.backward(model(torch.full((2, 4), float(number + 1))).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in whole(ours, model).items()}


def clamped(optimizer: Any, *call: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.detach().clamp_(-0.2, 0.2)


def slowed(optimizer: Any, *call: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.003


HOOKS: dict[str, Callable[[Any], object]] = {
    "before": lambda optimizer: optimizer.register_step_pre_hook(slowed),
    "after": lambda optimizer: optimizer.register_step_post_hook(clamped),
}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}


@pytest.mark.parametrize("options", [{}, SHARDED])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.by_default
def test_hooks_of_a_step_are_called(hook: str, options: dict[str, Any], run_processes) -> None:
    (wanted,) = run_processes(hooked, hook, "single", {}, world=1)
    for found in run_processes(hooked, hook, "megatron", options):
        torch.testing.assert_close(found, wanted)
