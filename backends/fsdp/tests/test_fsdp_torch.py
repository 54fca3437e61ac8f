"""What this package takes of torch that is not documented, and what it leaves behind."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fsdp_problem import TIMEOUT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_core import Accelerator, ParallelismConfig
from accel_fsdp.experts.stacks import Spread

NAMES = {
    "torch.distributed.fsdp:FSDPModule": ["_get_fsdp_state"],
    "torch.distributed.fsdp:ShardingStrategy": ["_HYBRID_SHARD_ZERO2"],
    "torch.amp:GradScaler": ["_unscale_grads_"],
    "torch.distributed.tensor._random": ["is_rng_supported_mesh"],
    "torch.distributed._functional_collectives": ["all_to_all_single_autograd"],
    "torch.distributed.device_mesh:DeviceMesh": ["_flatten", "_concatenate"],
    "torch.distributed.pipelining.schedules:PipelineScheduleSingle": ["eval"],
    "torch.distributed.fsdp._flat_param:FlatParameter": ["_init_metadata"],
    "torch._C._distributed_c10d": ["HashStore"],
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
    NAMES["torch.distributed.fsdp:FSDPModule"].append("set_reduce_scatter_unused_params")


@pytest.mark.parametrize("where", NAMES)
def test_torch_still_has_the_names_that_are_used(where: str) -> None:
    module, _, attribute = where.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, attribute) if attribute else found
    assert [name for name in NAMES[where] if not hasattr(found, name)] == []


def replicated_by_slices() -> tuple[int, tuple[str, ...] | None]:
    del DeviceMesh._concatenate  # as in torch 2.9
    run = Accelerator(
        device="cpu",
        strategy="fsdp",
        plugins=[TIMEOUT, ParallelismConfig(dp_replicate=2)],
    )
    model = run.prepare(nn.Linear(8, 8))
    run.backward(model(torch.ones(1, 8)).sum())
    mesh = model.weight.device_mesh
    run.end_training()
    return mesh.ndim, mesh.mesh_dim_names


@pytest.mark.full
def test_replicas_are_made_without_what_torch_2_9_lacks(run_processes) -> None:
    assert run_processes(replicated_by_slices, world=4) == [(2, ("dp_replicate", "dp_shard"))] * 4


def groups_left() -> list[int]:
    dist.init_process_group("cpu:gloo")
    found = []
    for _ in range(3):
        run = Accelerator(device="cpu", strategy="fsdp", plugins=[ParallelismConfig(dp_replicate=2)])
        model = run.prepare(nn.Linear(8, 8))
        run.backward(model(torch.ones(1, 8)).sum())
        run.end_training()
        found.append(len(dist.distributed_c10d._world.pg_map))
    dist.destroy_process_group()
    return found


@pytest.mark.full
def test_a_run_leaves_no_groups_in_a_process_group_of_the_users(run_processes) -> None:
    for found in run_processes(groups_left, world=4):
        assert found[0] == found[1] == found[2]


def norms(run: Accelerator) -> list[float]:
    """Norms of the gradients in two steps; torch computes them over the groups of the mesh."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for _ in range(2):
        run.backward(model(torch.ones(1, 8)).square().sum())
        found.append(round(run.clip_grad_norm_(model.parameters(), 1.0).item(), 4))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, round(sum(run.get_state_dict(model, rank0_only=False).values()).sum().item(), 4)]


def replicated() -> Accelerator:
    return Accelerator(device="cpu", strategy="fsdp", plugins=[TIMEOUT, ParallelismConfig(dp_replicate=2)])


def after_others() -> list[list[float]]:
    first, second = replicated(), replicated()
    found = [norms(first), norms(second)]
    first.end_training()
    found.append(norms(second))
    second.end_training()
    with_other_groups = Accelerator(device="cpu", strategy="fsdp", plugins=[TIMEOUT])
    dist.new_group([0, 3])
    found.append(norms(third := replicated()))
    third.end_training()
    with_other_groups.end_training()
    return found


@pytest.mark.full
def test_runs_of_one_mesh_train_alike_beside_and_after_each_other(run_processes) -> None:
    for found in run_processes(after_others, world=4):
        assert all(losses == found[0] for losses in found)


def reads_of_a_layer() -> int:
    """How often a layer of experts reads sizes from the device."""
    reads = []
    before = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> object:
        reads.append(self)
        return before(self)

    class Experts(nn.Module):
        def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return rows * 2

    layer = type("Layer", (Spread, Experts), {})()
    group = SimpleNamespace(size=lambda: 1)
    vars(layer).update(_experts=4, _ranks=group, _name="experts")
    torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", lambda out, given, group: out.copy_(given))
        patch.setattr(
            "accel_fsdp.experts.stacks.all_to_all_single_autograd", lambda tensor, out, given, group: tensor
        )
        for forbidden in ("bincount", "item"):
            patch.setattr(torch.Tensor, forbidden, None)
        found = layer(torch.ones(5, 3), torch.tensor([2, 0, 2, 1]))
    torch.Tensor.tolist = before  # type: ignore[method-assign]
    assert found.tolist() == [[2.0] * 3] * 5
    return len(reads)


@pytest.mark.full
def test_experts_wait_for_the_device_once() -> None:
    assert reads_of_a_layer() == 1
