"""What holds a parameter from before `prepare`, or hooks one, is right or told: nothing is lost silently."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_problem import MLP, accelerator, distance, loss_of, net, plugin
from torch import Tensor, nn

from accel_core import AccelError, ConfigError
from accel_fsdp import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

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
    run.backward(loss_of(model, *batch()))
    said = said_by(optimizer.step)
    moved = distance(dict(run.get_state_dict(model)), before)
    run.end_training()
    return said, moved


def test_an_optimizer_that_was_never_prepared_steps_or_says_so(run_processes) -> None:
    for said, moved in run_processes(never_prepared, 1):
        assert said is None
        assert moved > 0
    for said, _ in run_processes(never_prepared, 2):
        assert said is not None
        assert said.startswith("0.weight: ")
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
    moved = distance(dict(run.get_state_dict(model)), before)
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


def hooked_after(version: int, kind: str) -> str | None:
    run = accelerator(plugin("mlp", version))
    model = run.prepare(net("mlp"))
    said = said_by(lambda: getattr(next(iter(model.parameters())), kind)(print))
    run.end_training()
    return said


@pytest.mark.full
def test_so_are_those_that_come_later(run_processes) -> None:
    for version, kind in (
        (1, "register_hook"),
        (2, "register_hook"),
        (1, "register_post_accumulate_grad_hook"),
    ):
        for said in run_processes(hooked_after, version, kind):
            assert said is not None
            assert said.startswith("0.weight is sharded, and register_")


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
    gap = distance(dict(run.get_state_dict(model)), alone.state_dict())
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


def copied(version: int) -> str:
    run = accelerator(plugin("mlp", version))
    model = run.prepare(MLP())
    with pytest.raises(Exception, match="deepcopy") as caught:
        copy.deepcopy(model)
    run.end_training()
    return str(caught.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_copy_is_refused_in_words_about_copies(version: int, run_processes) -> None:
    for said in run_processes(copied, version):
        assert "DataLoader" not in said


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


def with_stand_ins(version: int, kind: str) -> tuple[str | None, float]:
    """A forward with other tensors for the parameters: before any other, or after a step."""
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    if kind == "later":
        run.backward(loss_of(model, *batch()))
        optimizer.step()
        optimizer.zero_grad()
    before = dict(run.get_state_dict(model))
    halves = {
        name: nn.Parameter(tensor * 0.5) if kind == "parameters" else tensor * 0.5
        for name, tensor in model.named_parameters()
    }
    said = said_by(lambda: torch.func.functional_call(model, halves, (batch()[0],)))
    moved = distance(dict(run.get_state_dict(model)), before)
    loss_of(model, *batch()).backward()  # the model's own parameters are back
    run.end_training()
    return said, moved


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["first", "later", "parameters"])
def test_a_functional_call_of_sharded_weights_is_refused_and_changes_none(
    version: int, kind: str, run_processes
) -> None:
    for said, moved in run_processes(with_stand_ins, version, kind):
        assert said is not None
        assert said.startswith("another tensor stands for the sharded parameter weight of Linear")
        assert moved == 0


def replaced(kind: str) -> str | None:
    """What a forward says after a step, and after a sharded parameter's place or data was given away."""
    run = accelerator(plugin("mlp", 2))
    given = net("mlp")
    model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    run.backward(loss_of(model, *batch()))
    optimizer.step()
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    if kind == "no bias":
        linear.bias = None
    else:
        linear.weight.data = torch.ones(linear.weight.shape)
    said = said_by(lambda: model(batch()[0]))
    run.end_training()
    return said


@pytest.mark.full
@pytest.mark.parametrize(("kind", "other"), [("no bias", "nothing"), ("data", "another tensor")])
def test_a_sharded_parameter_that_is_taken_away_or_given_other_data_is_refused(
    kind: str, other: str, run_processes
) -> None:
    """Torch would put its own shard back, and compute with that, silently."""
    for said in run_processes(replaced, kind):
        assert said is not None
        assert said.startswith(f"{other} stands for the sharded parameter")


SPLIT = TorchTensorParallelPlugin(tp_size=2, parallelize_plan={"1.up": "colwise", "1.down": "rowwise"})


def given_data(folder: str, split: bool) -> list[str | None]:
    """What saving says of a weight whose data was assigned, and what reads it otherwise."""
    run = accelerator(plugin("mlp", 2), *[SPLIT] * split)
    model, _ = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    weight = model[1].up.weight
    weight.data = weight.data * 0
    reads = (
        partial(run.save_state, folder),
        partial(run.get_state_dict, model),
        model.state_dict,
        model[1].up.state_dict,
        partial(run.full_parameters, model),
        *[partial(model, batch()[0])] * split,
    )
    found = [said_by(read) for read in reads]
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("split", [False, True])
def test_a_sharded_parameter_that_was_given_other_data_is_not_saved_as_it_was(
    split: bool, tmp_path: Path, run_processes
) -> None:
    """The shard stays as it was, and is what would be saved, or computed with where a layer is split."""
    for found in run_processes(given_data, str(tmp_path / "saved"), split):
        assert all("was given other data" in str(said) for said in found)


def loaded_whole() -> float:
    run = accelerator(plugin("mlp", 2))
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    wanted = {name: tensor + 1 for name, tensor in run.get_state_dict(model).items()}
    run.backward(loss_of(model, *batch()))
    optimizer.step()
    with run.full_parameters(model, writeback=True):
        model.load_state_dict(wanted)
    found = distance(dict(run.get_state_dict(model)), wanted)
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
    "a part": lambda model: next(each for each in model.modules() if isinstance(each, nn.Linear)).cpu(),
    "to another dtype": lambda model: model.double(),
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
        after = run.get_state_dict(model)
        assert {tensor.dtype for tensor in after.values()} == {torch.float32}
        run.backward(loss_of(model, *batch()))
        optimizer.step()
        assert distance(dict(run.get_state_dict(model)), after) > 0
        run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", [kind for kind in CONVERSIONS if kind != "to another dtype"])
def test_a_conversion_that_changes_nothing_passes(version: int, kind: str, run_processes) -> None:
    for found in run_processes(converted, version, kind):
        assert found == [None, None, None]


@pytest.mark.full
def test_a_conversion_of_sharded_weights_is_refused_and_changes_none(run_processes) -> None:
    for found in run_processes(converted, 2, "to another dtype"):
        assert all("are sharded, and cannot be converted" in str(said) for said in found)


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


def converted_before_backward() -> list[str | None]:
    """What conversions of parts say while a forward has their group's weights gathered."""
    run = accelerator(plugin("mlp", 2, reshard_after_forward=False))
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    loss = loss_of(model, *batch())
    found = [said_by(part.half) for part in (model[0], model[1].up, model)]
    found.append(said_by(partial(model[0].to, "cpu")))
    run.backward(loss)
    optimizer.step()
    run.end_training()
    return found


@pytest.mark.full
def test_a_conversion_of_a_part_between_forward_and_backward_is_not_lost(run_processes) -> None:
    for *refused, passed in run_processes(converted_before_backward):
        assert all("are sharded, and cannot be converted" in str(said) for said in refused)
        assert passed is None


class Following(nn.Linear):
    """Has a tensor that is no buffer, and converts it too."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.scale = torch.ones(1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Following:
        super()._apply(fn, recurse)
        self.scale = fn(self.scale)
        return self


def followed(own_group: bool) -> bool:
    wrapped = ["Following"] if own_group else []
    run = accelerator(FullyShardedDataParallelPlugin(fsdp_version=2, transformer_cls_names_to_wrap=wrapped))
    model = run.prepare(nn.Sequential(Following(), nn.Tanh()))
    before = model[0].scale
    model._apply(lambda tensor: tensor.clone() if tensor is before else tensor)
    run.end_training()
    return model[0].scale is not before


@pytest.mark.full
@pytest.mark.parametrize("own_group", [True, False])
def test_a_module_with_a_conversion_of_its_own_is_asked_for_it(own_group: bool, run_processes) -> None:
    assert all(run_processes(followed, own_group))


def assigned(version: int) -> list[tuple[str | None, bool]]:
    run = accelerator(plugin("mlp", version))
    model = run.prepare(net("mlp"))
    before = run.get_state_dict(model)
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    found = []
    for each in (model, run.unwrap_model(model)):
        said = said_by(partial(each.load_state_dict, state, assign=True))
        found.append((said, distance(dict(run.get_state_dict(model)), before) == 0))
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_tensors_that_would_take_the_place_of_sharded_weights_are_refused(
    version: int, run_processes
) -> None:
    for found in run_processes(assigned, version):
        for said, is_untouched in found:
            assert said is not None
            assert said.startswith("load_state_dict(assign=True): the weights of this ")
            assert is_untouched


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
