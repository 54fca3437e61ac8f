"""Parameters, optimizers and settings that DeepSpeed alone fails on: served, or refused by name."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator
from torch import nn

from accel_core import Accelerator, AccelError, ConfigError
from accel_deepspeed import DeepSpeedPlugin
from accel_deepspeed.gradients import Gradients
from accel_deepspeed.strategy import DeepSpeed

pytestmark = pytest.mark.full


class Rated(torch.optim.SGD):
    """A rate for each tensor, by its norm: the rule of LAMB and LARS, in a class that no list can know."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.sub_(group["lr"] * each.norm() * each.grad)


class Camera(torch.optim.SGD):
    """Steps single elements, though its name contains that of CAME, which needs rows and columns."""


def refused(stage: int, kind: str) -> str:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    model = nn.Linear(4, 4, bias=False)
    optimizer = (Rated if kind == "Rated" else getattr(torch.optim, kind))(model.parameters())
    with pytest.raises(ConfigError) as caught:
        ours.prepare(model, optimizer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "kind"), [(0, "LBFGS"), (2, "LBFGS"), (1, "Adafactor"), (3, "Muon"), (2, "Rated")]
)
def test_an_optimizer_that_needs_whole_parameters_is_refused(stage: int, kind: str, run_processes) -> None:
    (found,) = run_processes(refused, stage, kind, world=1)
    assert found.startswith(f"{kind} ")
    assert "such as AdamW, or strategy ddp" in found.splitlines()[-1]


def served(kind: str) -> bool:
    ours = accelerator(DeepSpeedPlugin(zero_stage=2))
    model = nn.Linear(4, 4)
    ours.prepare(
        model, (Camera if kind == "Camera" else getattr(torch.optim, kind))(model.parameters(), lr=0.1)
    )
    return True


@pytest.mark.parametrize("kind", ["Camera", "RMSprop"])
def test_an_optimizer_that_steps_single_elements_is_served(kind: str, run_processes) -> None:
    assert run_processes(served, kind, world=1) == [True]


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 2))
    return made.to(memory_format=torch.channels_last)


def stepped(stage: int) -> dict[str, torch.Tensor]:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    model = convolution()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    images = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)
    for _ in range(2):
        ours.backward(model(images).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_in_another_order_of_memory_step_as_in_torch(stage: int, run_processes) -> None:
    model, images = convolution(), torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_processes(stepped, stage):
        for name, each in model.state_dict().items():
            torch.testing.assert_close(found[name], each)


class Turns(nn.Module):
    """Uses one of its heads in a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        answer: torch.Tensor = self.heads[head](torch.tanh(self.body(x)))
        return answer


def in_turns(stage: int, offload: str) -> dict[str, torch.Tensor]:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device=offload))
    model = Turns()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        ours.backward(model(torch.linspace(-1, 1, 8).reshape(2, 4), step % 2).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, "none"), (1, "none"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]
)
def test_what_a_step_does_not_use_is_not_stepped_by_an_older_gradient(
    stage: int, offload: str, run_processes
) -> None:
    model = Turns()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.linspace(-1, 1, 8).reshape(2, 4), step % 2).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_processes(in_turns, stage, offload):
        for name, each in model.state_dict().items():
            torch.testing.assert_close(found[name], each)


def clipped_too_early(stage: int, offload: str) -> str:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage, offload_optimizer_device=offload))
    model: nn.Module = nn.Linear(4, 3)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AccelError) as caught:
        optimizer.step()
    assert "there was no backward through the model that prepare returned" in str(caught.value)
    ours.backward(model(torch.ones(2, 4)).sum())
    ours.clip_grad_norm_(model.parameters(), 0.3)
    ours.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(AccelError) as caught:
        optimizer.step()
    optimizer.zero_grad()
    ours.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "offload"), [(1, "none"), (2, "none"), (2, "cpu"), (3, "none"), (3, "cpu")]
)
def test_a_step_is_of_one_reduction_after_the_last_backward(stage: int, offload: str, run_processes) -> None:
    for said in run_processes(clipped_too_early, stage, offload):
        assert "after clipping or unscaling came another backward" in said


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


class Hollow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(0, 2))


def without_dimension() -> None:
    with pytest.raises(AccelError, match=r"scale has no dimension.*\n.*the shape \(1,\)"):
        accelerator().prepare(Scaled())
    with pytest.raises(AccelError, match=r"weight has no elements.*\n.*zero_stage to 0"):
        accelerator().prepare(Hollow())
    with pytest.raises(AccelError) as refusal:
        accelerator().prepare(nn.Linear(2, 2).double())
    assert str(refusal.value) == (  # one line for all of them
        "weight is float64, and DeepSpeed steps in float32 (1 more like it)\n"
        "make it float32, or use strategy ddp"
    )
    with pytest.raises(AccelError, match="weight is on the meta device and has no values"):
        accelerator().prepare(nn.Linear(2, 2, device="meta"))


def test_a_parameter_without_dimensions_elements_or_values_or_of_float64_is_refused(run_processes) -> None:
    run_processes(without_dimension, world=1)


def of_odd_numbers(stage: int, precision: str) -> None:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage), mixed_precision=precision)
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(AccelError, match=r"weight is torch.complex64.*\nmake it two real ones"):
        ours.prepare(model, torch.optim.AdamW(model.parameters()))
    for layer in (nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)):
        with pytest.raises(AccelError, match=r"0: ZeRO takes no sparse gradients.*\nmake the module without"):
            ours.prepare(nn.Sequential(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    trained = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    ours.prepare(nn.Sequential(trained, nn.Embedding(4, 2, sparse=True).requires_grad_(False)), optimizer)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_complex_weights_and_sparse_gradients_are_refused(stage: int, precision: str, run_processes) -> None:
    run_processes(of_odd_numbers, stage, precision, world=1)


class Adapted(nn.Module):
    """A frozen base, of which the optimizer is told first, and a trained layer of float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter(torch.randn(3, 3).to(dtype), requires_grad=False)
        self.adapter = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x) @ self.base.real.to(x.dtype)


def beside_a_frozen_base(stage: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after a step of ours, and of a plain one."""
    ours, x = accelerator(DeepSpeedPlugin(zero_stage=stage)), torch.linspace(-1, 1, 12).reshape(4, 3)
    model, plain = Adapted(dtype), Adapted(dtype)
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.backward(model(x).pow(2).mean())
    optimizer.step()
    plain(x).pow(2).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return ours.get_state_dict(model, rank0_only=False)[
        "adapter.weight"
    ].clone(), plain.adapter.weight.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_are_not_of_the_dtype_of_a_frozen_base(
    stage: int, dtype: torch.dtype, run_processes
) -> None:
    for ours, plain in run_processes(beside_a_frozen_base, stage, dtype, world=1):
        torch.testing.assert_close(ours, plain)


def of_looked_up_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after a step of stage 0, whose gradients are sparse, and of a plain one."""
    ours = accelerator(DeepSpeedPlugin(zero_stage=0))
    torch.sparse.check_sparse_tensor_invariants.enable()  # else DeepSpeed's sparse tensors warn
    torch.manual_seed(0)
    model = nn.Embedding(6, 2, sparse=True)
    plain = nn.Embedding(6, 2, _weight=model.weight.detach().clone())
    rows = torch.tensor([[0, 1], [1, 5]])
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.backward(model(rows[ours.process_index]).pow(2).mean())
    optimizer.step()
    plain(rows).pow(2).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return ours.get_state_dict(model, rank0_only=False)["weight"].detach().clone(), plain.weight.detach()


def test_stage_0_trains_sparse_gradients(run_processes) -> None:
    for trained, plain in run_processes(of_looked_up_rows):
        torch.testing.assert_close(trained, plain)


def by_json() -> tuple[str, str]:
    plugin = DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    ours = Accelerator(device="cpu", plugins=[plugin])
    model = nn.Linear(2, 2)
    model, _ = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours.backward(model(torch.ones(2, 2)).float().sum())
    return ours.mixed_precision, str(ours.run.stack)


def test_a_json_may_say_the_precision_alone(run_processes) -> None:
    assert run_processes(by_json, world=1) == [("bf16", "native + deepspeed + bf16")]


def left(before: str | None) -> tuple[str | None, str | None]:
    """LOCAL_RANK while a unit is there, and afterwards."""
    os.environ.pop("LOCAL_RANK", None)
    if before is not None:
        os.environ["LOCAL_RANK"] = before
    ours = accelerator()
    ours.prepare(nn.Linear(2, 2))
    during = os.environ.get("LOCAL_RANK")
    ours.end_training()
    return during, os.environ.get("LOCAL_RANK")


def test_what_the_environment_says_to_deepspeed_ends_with_the_run(run_processes) -> None:
    assert run_processes(left, None, world=1) == [("0", None)]
    assert run_processes(left, "0", world=1) == [("0", "0")]


OFFLOADING = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    "given",
    [{"zero_stage": 2, "offload_optimizer_device": "cpu"}, {"hf_ds_config": OFFLOADING}],
    ids=["option", "JSON"],
)
def test_offloading_in_gaudis_lazy_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    run: Any = SimpleNamespace(stack=SimpleNamespace(device=SimpleNamespace(name="hpu")))
    config: Any = None
    plugin = DeepSpeed(DeepSpeedPlugin(**given), run)

    (reason,) = plugin.refuse(config)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")

    assert reason.endswith("set hpu.lazy: false")
    assert plugin.refuse(config) == []


def test_offloaded_gradients_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.accelerator

    gradient, arrived = torch.zeros(2), torch.tensor([3.0, -9.0])
    device = SimpleNamespace(synchronize=lambda: gradient.copy_(arrived))
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: device)
    parameter = SimpleNamespace(requires_grad=True, grad=gradient)
    engine = SimpleNamespace(
        module=SimpleNamespace(parameters=lambda: [parameter]),
        optimizer=None,
        zero_grad=None,
        set_gradient_accumulation_boundary=bool,
    )

    Gradients(engine, 0.0, fixed=False).clamp(4.0)

    assert gradient.tolist() == [3.0, -4.0]


def stepped_before() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="the SGD has state already, and DeepSpeed's engine"):
        accelerator().prepare(model, optimizer)


def with_an_empty_group() -> None:
    model = nn.Linear(2, 2)
    ours = accelerator(DeepSpeedPlugin(zero_stage=2))
    scheduled, alone = (
        torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}]) for _ in range(2)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)
    with pytest.raises(ConfigError, match=r"group without parameters(.|\n)*without empty groups"):
        ours.prepare(model, scheduled, scheduler)
    model, optimizer = ours.prepare(model, alone)
    ours.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()


def test_an_empty_group_is_refused_where_a_scheduler_sets_its_rate(run_processes) -> None:
    run_processes(with_an_empty_group, world=1)


def test_an_optimizer_that_has_stepped_is_refused(run_processes) -> None:
    run_processes(stepped_before, world=1)


def answered(stage: int) -> str:
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage), mixed_precision="bf16")
    model = nn.Linear(2, 2)
    model, _ = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return str(model(torch.ones(2, 2)).dtype)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_in_16_bits_answers_in_float32(stage: int, run_processes) -> None:
    assert run_processes(answered, stage, world=1) == ["torch.float32"]


def changed(stage: int, change: str) -> str:
    """Return the error of a step after a change of the model or the optimizer's groups."""
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    given = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given[0].requires_grad_(change != "unfrozen")
    groups = [{"params": [*given[0].parameters(), *given[1].parameters()]}]
    model, optimizer = ours.prepare(given, torch.optim.SGD(groups, lr=0.1))
    for number in range(2):
        if number == 1:
            match change:
                case "frozen" | "unfrozen":
                    given[0].requires_grad_(change == "unfrozen")
                case "replaced":
                    given[0].weight = nn.Parameter(torch.ones(4, 4))
                case "regrouped":
                    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1)))
        try:
            ours.backward(model(torch.ones(2, 4)).square().sum())
            optimizer.step()
        except AccelError as error:
            assert number == 1
            return str(error)
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2])  # in stage 3 DeepSpeed fails at a parameter that is replaced
@pytest.mark.parametrize("change", ["frozen", "unfrozen", "replaced", "regrouped"])
def test_what_the_engine_would_not_follow_is_refused(stage: int, change: str, run_processes) -> None:
    (said,) = run_processes(changed, stage, change, world=1)
    assert said.startswith("strategy 'deepspeed' cannot follow a change to unit 'unit0' after prepare")


def lowered(kind: str) -> tuple[list[float], torch.Tensor]:
    from deepspeed.ops.adam import FusedAdam

    ours = accelerator(DeepSpeedPlugin(zero_stage=0), mixed_precision="bf16")
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    kinds = {"its own": FusedAdam, "torch's": torch.optim.AdamW}
    model, optimizer = ours.prepare(model, kinds[kind](model.parameters(), lr=0.01, weight_decay=0.01))
    norms = []
    for _ in range(3):
        ours.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum())
        norms.append(float(ours.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, ours.get_state_dict(model, rank0_only=False)["weight"].float()


@pytest.mark.full  # DeepSpeed compiles its optimizer
def test_deepspeeds_own_adam_trains_in_bf16_in_stage_0_as_torchs_does(run_processes) -> None:
    ((norms, weight),) = run_processes(lowered, "its own", world=1, timeout=300)
    ((of_torch, expected),) = run_processes(lowered, "torch's", world=1, timeout=300)
    assert norms == pytest.approx(of_torch, rel=1e-2)
    torch.testing.assert_close(weight, expected, rtol=1e-2, atol=1e-3)
