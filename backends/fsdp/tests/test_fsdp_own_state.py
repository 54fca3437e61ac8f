"""State of modules by `_save_to_state_dict` or `get_extra_state`, where weights are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_problem import accelerator
from torch import Tensor, nn

from accel_fsdp import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.full


class Tally(nn.Linear):
    """Counts its forwards under a key of its own beside its parameters."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.calls = int(state_dict.pop(f"{prefix}calls", 0))
        super()._load_from_state_dict(state_dict, prefix, *args)


class Journal(nn.Linear):
    """The same by `get_extra_state`."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def resumed(kind: type[nn.Linear], version: int, folder: str, wrapped: bool) -> tuple[int, int, list[str]]:
    policy = (
        {"transformer_cls_names_to_wrap": [kind.__name__]} if wrapped else {"auto_wrap_policy": "NO_WRAP"}
    )
    run = accelerator(FullyShardedDataParallelPlugin(fsdp_version=version, **policy))
    model = nn.Sequential(kind(6, 4), nn.Linear(4, 1))
    inner: Any = model[0]
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        run.backward(model(torch.ones(2, 6)).sum())
        optimizer.step()
        optimizer.zero_grad()
    run.save_state(folder)
    trained, inner.calls = inner.calls, 0
    run.load_state(folder)
    names = sorted(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return trained, inner.calls, names


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "a block"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("kind", "key"), [(Tally, "0.calls"), (Journal, "0._extra_state")])
def test_what_a_module_keeps_of_its_own_is_saved_and_resumed(
    tmp_path: Any, kind: type[nn.Linear], key: str, version: int, wrapped: bool, run_processes
) -> None:
    for trained, calls, names in run_processes(resumed, kind, version, str(tmp_path / "ck"), wrapped):
        assert (trained, calls) == (3, 3)
        assert names == sorted(["0.weight", "0.bias", key, "1.weight", "1.bias"])
