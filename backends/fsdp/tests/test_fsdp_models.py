"""Models as others write them: in float64, transformers' decoders in stages and split by layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fsdp_problem import TIMEOUT, accelerator, net, plugin, sized
from torch import Tensor, nn
from torch.nn import functional as F

from accel_core import Accelerator, AccelError, ConfigError
from accel_fsdp import TorchTensorParallelPlugin
from accel_fsdp.sharding.norms import Layout, clip_norm

VERSIONS = (1, 2)
SGD = torch.optim.SGD


def of_doubles(version: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms of three clipped steps, and weights; torch takes text for a norm too."""
    run = accelerator(plugin("mlp", version)) if version else Accelerator(device="cpu")
    model = net("mlp").double()
    model, optimizer = run.prepare(model, SGD(model.parameters(), lr=0.5))
    norms = []
    for step, norm_type in enumerate((2, "inf", "1")):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        run.backward(model(x).square().mean())
        norms.append(run.clip_grad_norm_(model.parameters(), 0.1, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return norms, weights


@pytest.mark.parametrize("version", VERSIONS)
def test_models_in_float64_are_clipped_in_float64(version: int, run_processes) -> None:
    norms, weights = of_doubles(0)
    for found in run_processes(of_doubles, version):
        assert found[0] == pytest.approx(norms, rel=1e-12)
        torch.testing.assert_close(found[1], weights, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf])
def test_a_norm_that_parts_of_gradients_do_not_add_up_to_is_refused(norm_type: float) -> None:
    layout = Layout.of([nn.Parameter(torch.ones(3))])
    with pytest.raises(AccelError, match=r"norm_type is .*\ngive 2, any other p above 0, or inf"):
        clip_norm(layout, 1.0, norm_type, torch.device("cpu"))


def llama(heads: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, None]:
    logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), None


def in_stages(stages: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    configs = sized(pp=2, pp_split_points=["model.layers.1"])
    run = Accelerator(
        device="cpu",
        strategy="fsdp" if stages else "single",
        plugins=[TIMEOUT, *(configs if stages else [])],
    )
    model = llama().double()
    model, optimizer = run.prepare(model, SGD(model.parameters(), lr=0.5))
    losses = []
    for step in range(3):
        ids = torch.randint(32, (2, 2, 7), generator=torch.Generator().manual_seed(step))
        losses.append(run.forward_backward(model, list(ids), loss_of, microbatches=2).loss)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return losses, weights


@pytest.mark.needs("transformers")
def test_a_decoder_of_transformers_runs_in_stages_in_float64(run_processes) -> None:
    losses, weights = in_stages(0)
    for found in run_processes(in_stages, 2):
        torch.testing.assert_close(found[0], losses, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], weights, rtol=1e-12, atol=1e-12)


def split(heads: int, **options: Any) -> Accelerator:
    return Accelerator(
        device="cpu",
        strategy="fsdp",
        plugins=[TIMEOUT, TorchTensorParallelPlugin(tp_size=2, **options)],
    )


def parted_heads() -> str:
    run = split(1)
    with pytest.raises(ConfigError) as caught:
        run.prepare(llama(1))
    run.end_training()
    return str(caught.value)


@pytest.mark.full
@pytest.mark.needs("transformers")
def test_heads_are_not_split(run_processes) -> None:
    for said in run_processes(parted_heads):
        assert said.startswith("model.layers.0.self_attn.k_proj is split over parallelism.tp 2")
        assert said.splitlines()[-1] == "choose a size that divides 1"


class Head(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(32, 8), nn.Linear(8, 32))


def evaluated() -> tuple[float, float]:
    run = split(1, parallelize_plan={"1": "colwise_rep"}, loss_parallel=True)
    model = run.prepare(Head())
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        alone = F.cross_entropy(Head()(ids).flatten(0, 1), ids.flatten())
    run.end_training()
    return loss.item(), alone.item()


@pytest.mark.full
def test_logits_that_are_split_for_training_are_whole_in_evaluation(run_processes) -> None:
    for loss, alone in run_processes(evaluated):
        assert loss == pytest.approx(alone, rel=1e-6)


def sharing(version: int) -> str:
    run = accelerator(plugin("mlp", version))
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    optimizer = SGD([*dict.fromkeys([*first.parameters(), *second.parameters()])], lr=0.1)
    try:
        run.prepare(first, second, optimizer)
    except ConfigError as error:
        return str(error)
    finally:
        run.end_training()
    return ""


@pytest.mark.parametrize("version", VERSIONS)
def test_models_with_one_parameter_are_refused(version: int, run_processes) -> None:
    for found in run_processes(sharing, version):
        assert "weight of the Linear is weight of the Linear too" in found
