"""Any model where each rank has all of it: plain SGD steps, to the digit; its buffers; what is refused."""

from __future__ import annotations

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
    found: dict[str, torch.Tensor] = ours.get_state_dict(model)
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


@pytest.mark.full
def test_gradients_of_a_step_that_are_not_cleared_are_refused(run_processes) -> None:
    """megatron-core would reduce what is reduced already, and add it to itself."""
    for said in run_processes(cleared_by, "megatron", "nothing"):
        assert said.startswith("megatron: backward came after optimizer.step() without zero_grad()")


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


def changed(begins: bool) -> list[str]:
    ours, said = accelerator(), []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(begins)
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for trains in (begins, not begins):
        ours.unwrap_model(model)[0].requires_grad_(trains)
        ours.backward(model(torch.ones(2, 4)).square().sum())
        try:
            optimizer.step()
        except AccelError as error:
            said.append(f"{trains} {error}")
        optimizer.zero_grad()
    return said


@pytest.mark.full
def test_a_parameter_that_is_unfrozen_after_prepare_is_refused(run_processes) -> None:
    """megatron-core would leave it as it is, without a word."""
    (found,) = run_processes(changed, False, world=1)
    assert len(found) == 1
    assert found[0].startswith("True megatron: 2 parameter(s) were frozen")
    assert "(0.weight)" in found[0]


@pytest.mark.full
def test_a_parameter_that_is_frozen_after_prepare_is_refused(run_processes) -> None:
    """megatron-core would go on by its moments and decay."""
    (found,) = run_processes(changed, True, world=1)
    assert len(found) == 1
    assert found[0].startswith(
        "False megatron: 2 parameter(s) were trained when the model was prepared and are"
    )
    assert "(0.weight)" in found[0]


def added() -> str:
    ours = accelerator()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model[1].parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(ours.unwrap_model(model)[0].parameters())})
    ours.backward(model(torch.ones(2, 4)).square().sum())
    try:
        optimizer.step()
    except AccelError as error:
        return str(error)
    return "nothing"


@pytest.mark.full
def test_a_group_that_is_added_after_prepare_is_refused(run_processes) -> None:
    """megatron-core would leave its weights as they are, without a word."""
    (found,) = run_processes(added, world=1)
    assert found.startswith("megatron: 2 parameter(s) came into the optimizer after prepare (0.weight)")


def of_a_part() -> list[str]:
    """Norms of a layer that is trained alone, the other one not frozen: of both layers, of the layer."""
    ours, said = accelerator(), []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.ones_(model[1].weight)
    layers = [model, model[1]]
    model, _ = ours.prepare(model, torch.optim.AdamW(model[1].parameters(), lr=0.1))
    ours.backward(model(torch.zeros(2, 4)).sum())
    for layer in layers:
        try:
            said.append(str(float(ours.clip_grad_norm_(layer.parameters(), 1.0))))
        except AccelError as error:
            said.append(str(error))
    return said


def of_some_trained() -> list[str]:
    """What clipping by norm and by value say of one of two layers that are trained."""
    ours, said = accelerator(), []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, _ = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    ours.backward(model(torch.ones(2, 4)).sum())
    for clip in (ours.clip_grad_norm_, ours.clip_grad_value_):
        with pytest.raises(AccelError) as caught:
            clip(list(model.parameters())[:2], 1.0)
        said.append(str(caught.value))
    ours.clip_grad_value_(model.parameters(), 1.0)
    return said


@pytest.mark.full
def test_a_part_of_what_is_trained_is_not_clipped_alone(run_processes) -> None:
    """megatron-core would clip all of it, without a word."""
    for said in run_processes(of_some_trained):
        assert ["clips a unit's parameters together" in each for each in said] == [True, True]


def of_all_but_positions() -> str:
    ours, model = accelerator(), gpt2()
    some = [each for name, each in model.named_parameters() if "wpe" not in name]
    model, _ = ours.prepare(model, torch.optim.AdamW(some, lr=0.1))
    ours.backward(model(**batches(1)[0]).loss)
    try:
        return str(float(ours.clip_grad_norm_(model.parameters(), 1.0)))
    except AccelError as error:
        return str(error)


@pytest.mark.full
def test_gradients_that_no_optimizer_steps_are_not_clipped_with_others(run_processes) -> None:
    """megatron-core's norm would be without them, without a word."""
    for of_both, of_one in run_processes(of_a_part):
        assert "no optimizer has 0.weight (2 such parameter(s)), whose gradient would count" in of_both
        assert float(of_one) > 0
    (of_converted,) = run_processes(of_all_but_positions, world=1)
    assert "no optimizer has transformer.wpe.weight (1 such parameter(s))" in of_converted


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


EDITS: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda weight: weight.detach().fill_(0.5),
    "data": lambda weight: weight.data.fill_(0.5),
}


def edited(distributed: bool) -> dict[str, list[torch.Tensor]]:
    """Of each edit of a layer: weights in float32 before it, saved after it, after two steps; and live."""
    found = {}
    ours = accelerator(mixed_precision="bf16", use_distributed_optimizer=distributed)
    for name, edit in EDITS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        model, optimizer = ours.prepare(model, optimizer)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            ours.backward(model(torch.ones(2, 4)).square().sum(), model=model)
            optimizer.step()
            optimizer.zero_grad()

        def weights(model: Any = model) -> torch.Tensor:
            return torch.cat([each.flatten() for _, each in ours.iter_weights(model, dtype=torch.float32)])

        step()
        states = [weights()]
        for parameter in ours.unwrap_model(model)[0].parameters():
            edit(parameter)
        states.append(weights())
        optimizer.param_groups[0]["lr"] = 0.0
        step()
        step()
        states.append(weights())
        live = [each.detach().float().flatten() for each in ours.unwrap_model(model).parameters()]
        found[name] = [*states, torch.cat(live)]
        optimizer.param_groups[0]["lr"] = 0.01
        step()
        live = [each.detach().float().flatten() for each in ours.unwrap_model(model).parameters()]
        assert torch.equal(torch.cat(live), weights().bfloat16().float())  # forward follows
    return found


def replaced() -> str:
    ours = accelerator(mixed_precision="bf16")
    model = nn.Linear(4, 4)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = ours.unwrap_model(model).weight
    weight.data = torch.full_like(weight.data, 0.5)
    ours.backward(model(torch.ones(2, 4)).square().sum())
    with pytest.raises(AccelError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.full
def test_a_weight_in_16_bits_whose_memory_was_replaced_is_refused(run_processes) -> None:
    (said,) = run_processes(replaced, world=1)
    assert "a weight of shape [4, 4] was replaced" in said


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("distributed", [False, True])
def test_the_next_step_and_the_next_save_start_from_edited_weights_in_16_bits(
    distributed: bool, run_processes
) -> None:
    for found in run_processes(edited, distributed, timeout=250):
        for name, (before, saved, after, live) in found.items():
            wanted = torch.cat([torch.full((20,), 0.5), before[20:]])  # the rest keeps its masters' digits
            assert torch.equal(saved, wanted), name
            assert torch.equal(after, wanted), name
            assert torch.equal(live, wanted.bfloat16().float()), name


def after(change: str, strategy: str, options: dict[str, Any]) -> Any:
    """Weights of SGD or AdamW steps after `change` of the optimizer or the model; or what was said."""
    ours = accelerator(strategy=strategy, **options)
    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": given[0].parameters()}, {"params": given[1].parameters(), "lr": 0.01}]
    model, optimizer = ours.prepare(given, torch.optim.AdamW(groups, lr=0.1, eps=1e-2))
    for number in range(3):
        if number == 1:
            CHANGES[change](given, optimizer)
        try:
            ours.backward(model(torch.full((2, 4), float(number + 1))).square().sum())
            if change == "assigned gradient" and number == 1:
                ours.unscale_gradients()
                given[0].weight.grad = torch.ones(4, 4)
            optimizer.step()
            optimizer.zero_grad()
        except AccelError as error:
            return str(error)
    try:
        return {name: each.clone() for name, each in whole(ours, model).items()}
    except AccelError as error:
        return str(error)


def moved(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop())


def clamped(optimizer: Any, *call: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.detach().clamp_(-0.2, 0.2)


def slowed(optimizer: Any, *call: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.003


def given_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.AdamW([{"params": [*layer.parameters()]} for layer in model])
    for parameter in model.parameters():
        other.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(parameter)}
    optimizer.load_state_dict(other.state_dict())


def rebuilt(model: Any, optimizer: Any) -> None:
    model[1] = nn.Linear(4, 4)


def placed(model: Any, optimizer: Any) -> None:
    model[1].weight.data = torch.ones(4, 4)


def converted(model: nn.Module, optimizer: Any) -> None:
    model.double().float()


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "left out": lambda model, optimizer: optimizer.param_groups[0]["params"].pop(),
    "moved": moved,
    "reversed": lambda model, optimizer: optimizer.param_groups.reverse(),
    "maximize": lambda model, optimizer: optimizer.param_groups[0].update(maximize=True),
    "given state": given_state,
    "converted": converted,
    "replaced": rebuilt,
    "placed": placed,
    "assigned gradient": lambda model, optimizer: None,
    "a hook before": lambda model, optimizer: optimizer.optimizer.register_step_pre_hook(slowed),
    "a hook after": lambda model, optimizer: optimizer.optimizer.register_step_post_hook(clamped),
}
"""What is done between two steps."""
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("left out", {}, "megatron: parameters were taken out of the optimizer's groups"),
        (
            "moved",
            {},
            "megatron: parameters were taken out of the optimizer's groups after prepare, or moved",
        ),
        ("reversed", {}, "megatron: parameters were taken out of the optimizer's groups after prepare"),
        ("maximize", {}, "megatron: AdamW with amsgrad or maximize"),
        ("given state", {}, "megatron: the optimizer was given state after prepare"),
        ("converted", {}, "megatron: 4 parameter(s) have a gradient that megatron-core does not see"),
        ("converted", SHARDED, "megatron: 4 parameter(s) have a gradient that megatron-core does not see"),
        ("placed", SHARDED, "megatron: a weight of shape [4, 4] was replaced"),
        ("assigned gradient", SHARDED, "megatron: 1 parameter(s) have a gradient that megatron-core does"),
        ("replaced", {}, "megatron: 1.weight was replaced, tied or added after prepare"),
    ],
)
def test_a_change_that_megatron_core_would_not_follow_is_refused(
    change: str, options: dict[str, Any], said: str, run_processes
) -> None:
    """Each was silent: the step, or what is saved, was of what prepare saw."""
    for found in run_processes(after, change, "megatron", options):
        assert str(found).startswith(said)


@pytest.mark.parametrize("options", [{}, SHARDED])
@pytest.mark.parametrize("change", ["a hook before", "a hook after"])
@pytest.mark.by_default
def test_hooks_of_a_step_are_called(change: str, options: dict[str, Any], run_processes) -> None:
    (wanted,) = run_processes(after, change, "single", {}, world=1)
    for found in run_processes(after, change, "megatron", options):
        torch.testing.assert_close(found, wanted)


def written(writes: bool) -> str | None:
    """The error of a step after a write into the user's model, whose weights are megatron-core's now."""
    ours = accelerator()
    given: Any = gpt2()
    model, optimizer = ours.prepare(given, torch.optim.AdamW(given.parameters(), lr=0.1))
    (batch,) = batches(1)
    if writes:
        nn.init.zeros_(given.lm_head.weight)
    try:
        ours.backward(model(**batch).loss)
        optimizer.step()
    except AccelError as error:
        return str(error)
    return None


@pytest.mark.full
def test_a_write_into_a_converted_model_is_refused_by_the_step(run_processes) -> None:
    """It went into placeholders, silently."""
    assert run_processes(written, False, world=1) == [None]
    (said,) = run_processes(written, True, world=1)
    assert said is not None
    assert "were written after prepare" in said
