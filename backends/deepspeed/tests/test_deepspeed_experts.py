"""DeepSpeed's mixture of experts: a rank's experts train, are saved and go on as if it had all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_problem import accelerator
from safetensors.torch import load_file
from torch import Tensor, nn

from accel_core import AccelError
from accel_deepspeed import DeepSpeedPlugin

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
EXPERTS, STEPS = 4, 3


class Net(nn.Module):
    """Four experts that differ, over `ep_size` ranks; no token is dropped, and none drawn at random."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        options = {"drop_tokens": False, "use_rts": False, "min_capacity": 0}
        self.moe = MoE(8, nn.Linear(8, 8), EXPERTS, ep_size, **options)
        mine = self.moe.deepspeed_moe.experts.deepspeed_experts
        begin = dist.get_rank() % ep_size * len(mine) if ep_size > 1 else 0
        for number, expert in enumerate(mine, begin):
            nn.init.normal_(expert.weight, generator=torch.Generator().manual_seed(number))
        nn.init.normal_(self.moe.deepspeed_moe.gate.wg.weight, generator=torch.Generator().manual_seed(9))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.moe(self.first(x))[0])
        return output


class Job:
    def __init__(self, stage: int, ep_size: int, grouped: bool = True) -> None:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        self.accelerator = accelerator(DeepSpeedPlugin(zero_stage=stage))
        model = Net(ep_size)
        groups: Any = {"params": list(model.parameters()), "name": "all"}
        optimizer = torch.optim.AdamW(split(groups) if grouped else [groups], lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, first: int) -> list[float]:
        """Losses and norms, of the same batches on all ranks."""
        found = []
        for step in range(first, first + STEPS):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.accelerator.backward(loss)
            found += [loss.item(), float(self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0))]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found


def saves(stage: int, ep_size: int, folder: str) -> list[list[float]]:
    """What is lost before and after a save."""
    job = Job(stage, ep_size)
    before = job.train(0)
    job.accelerator.save_state(f"{folder}/state")
    job.accelerator.save_model(job.model, f"{folder}/model")
    found = [before, job.train(STEPS)]
    job.accelerator.end_training()
    return found


def resumes(stage: int, ep_size: int, folder: str) -> list[float]:
    job = Job(stage, ep_size)
    job.train(50)
    job.accelerator.load_state(f"{folder}/state")
    found = job.train(STEPS)
    job.accelerator.end_training()
    return found


def test_experts_over_ranks_train_and_go_on_as_in_one_process(tmp_path: Path, run_processes) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    (expected,) = run_processes(saves, 2, 1, one, world=1, timeout=120)

    for found in run_processes(saves, 1, 2, two, world=2, timeout=120):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
    for stage, ep_size, world, folder in ((2, 2, 2, one), (1, 1, 1, two), (2, 1, 2, two)):
        for losses in run_processes(resumes, stage, ep_size, folder, world=world, timeout=120):
            assert losses == pytest.approx(expected[1], rel=1e-5)

    whole, spread = (load_file(Path(folder, "model", "model.safetensors")) for folder in (one, two))
    assert whole.keys() == spread.keys()
    assert f"moe.deepspeed_moe.experts.deepspeed_experts.{EXPERTS - 1}.weight" in spread
    for name, tensor in whole.items():
        torch.testing.assert_close(spread[name], tensor, rtol=1e-4, atol=1e-6)


def norms_of_a_rank() -> None:
    Job(0, 2)


def sharded_weights() -> None:
    Job(3, 1)


def one_group() -> None:
    Job(2, 2, grouped=False)


REFUSED: dict[Callable[[], None], str] = {
    norms_of_a_rank: "set zero_stage to 1 or 2",
    sharded_weights: "Native DeepSpeed MoE is not supported with ZeRO Stage 3",
    one_group: "None of the param groups are marked as MoE",
}


def refusals() -> dict[str, str]:
    from accel_core.contract.run import live

    said = {}
    for case in REFUSED:
        try:
            case()
        except AccelError as error:
            said[case.__name__] = str(error)
        for run in live():
            run.end()
    return said


def test_what_experts_cannot_be_trained_by_is_said_by_prepare(run_processes) -> None:
    for said in run_processes(refusals, world=2, timeout=120):
        for case, message in REFUSED.items():
            assert message in said.get(case.__name__, "nothing"), case.__name__
