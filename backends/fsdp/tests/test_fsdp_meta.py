"""Models that no rank builds whole: from the meta device, or from what rank 0 loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_problem import GPT, accelerator, distance, net, optimizer_of, plugin, steps_of, train_plainly
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from accel_core import AccelError
from accel_fsdp.sharding import meta

VERSIONS = (1, 2)


def built(version: int, options: dict[str, Any], kind: str = "gpt") -> tuple[list[str], dict[str, Tensor]]:
    run = accelerator(plugin(kind, version, **options))
    torch.manual_seed(0)
    with run.model_init_context():
        model = net(kind)
    devices = sorted({p.device.type for p in model.parameters()})
    optimizer = optimizer_of(model)
    model, optimizer = run.prepare(model, optimizer)
    list(steps_of(run, model, optimizer, kind, range(2)))
    found = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return devices, found


@pytest.mark.parametrize("version", VERSIONS)
def test_rank_0_alone_builds_the_model_and_all_train_it(version: int, run_processes) -> None:
    first, second = run_processes(built, version, {"cpu_ram_efficient_loading": True})
    assert (first[0], second[0]) == (["cpu"], ["meta"])
    for _, weights in (first, second):
        assert distance(weights, train_plainly("gpt", 2)[1]) < 1e-5


def first_weights(version: int, fill: Any) -> dict[str, Tensor]:
    run = accelerator(plugin("gpt", version, param_init_fn=fill))
    with run.model_init_context():
        model = GPT()
    torch.manual_seed(run.process_index)
    model = run.prepare(model)
    found = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_modules_of_the_meta_device_are_reset_and_stay_tied(version: int, run_processes) -> None:
    first, second = run_processes(first_weights, version, None)
    assert distance(first, second) == 0
    assert torch.equal(first["head.weight"], first["tokens.weight"])
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert first["blocks.0.before.weight"].eq(1).all()


def thirds(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 1 / 3)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_function_of_the_user_fills_each_module(version: int, run_processes) -> None:
    for found in run_processes(first_weights, version, thirds):
        assert {value for tensor in found.values() for value in tensor.flatten().tolist()} == {
            torch.tensor(1 / 3).item()
        }


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def nobody_knows() -> str:
    run = accelerator(plugin("gpt", 2, auto_wrap_policy="no_wrap"))
    with run.model_init_context():
        model = Own()
    with pytest.raises(AccelError) as caught:
        run.prepare(model)
    run.end_training()
    return str(caught.value)


def test_first_weights_that_nobody_knows_are_an_error_that_says_whose(run_processes) -> None:
    said = run_processes(nobody_knows, world=1)[0]
    assert "a Own was built on the meta device and has no reset_parameters" in said
    assert "fsdp.param_init_fn" in said.splitlines()[-1]


WIDTH, LAYERS = 64, 8


def peak() -> tuple[int, int, int]:
    run = accelerator(plugin("gpt", 2))
    with run.model_init_context():
        model = GPT(WIDTH, LAYERS)
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    whole = sum(p.nbytes for p in model.parameters())
    tracker = MemTracker()
    with tracker:
        run.prepare(model)
    peaks = tracker.get_tracker_snapshot("peak")
    run.end_training()
    return max(kinds["Total"] for kinds in peaks.values()), block, whole


def test_a_rank_never_holds_more_than_its_part_and_one_block(run_processes) -> None:
    for held, block, whole in run_processes(peak):
        # Two, as a thread of the process group lets go of what it has sent when it has the time.
        assert whole / 2 <= held < whole / 2 + 2.25 * block


class Holding(Tensor):
    """A tensor of a library: its numbers are in a tensor that it holds, as torchao's are."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: Any = "cpu") -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=device)
        made.held = held
        return made

    def to(self, device: torch.device) -> Tensor:  # type: ignore[override]
        return Holding(self.held.clone(), device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return Holding(args[0].held, args[0].device)


def test_what_a_librarys_tensor_holds_moves_to_the_device_with_it() -> None:
    """torchao's weights were on the GPU by name, and their numbers in host memory."""
    parameter: Any = nn.Parameter(Holding(torch.ones(4)))
    before = parameter.held
    meta.move(parameter, torch.device("cuda"))
    assert parameter.device.type == "cuda"
    assert parameter.held is not before
    assert isinstance(parameter, nn.Parameter)
