"""Where Accelerate is silently wrong in what many people write, the log says so, and core's own serves."""

from __future__ import annotations

import pytest
from peers import said

CONTRAST = """
import json, logging, torch
from accelerate import Accelerator
from accel_core import ops

told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("accel_core").addHandler(handler)
a = Accelerator(cpu=True)
weight = torch.ones(2, requires_grad=True)
for _ in range(2):
    gathered = a.gather(weight)
exact = ops.gather(weight, gradients=True)
exact.sum().backward()
print(json.dumps([gathered.requires_grad, [text[:39] for text in told], weight.grad.tolist()]))
"""
PARTS = """
import json, logging, torch
from torch.utils.data import DataLoader
from accelerate import Accelerator

told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("accel_core").addHandler(handler)
a = Accelerator(cpu=True, gradient_accumulation_steps=4)
model = torch.nn.Linear(6, 1)
model, optimizer, loader = a.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.randn(12, 6), batch_size=4)
)
steps = 0
for batch in loader:
    for part in batch.split(1):
        with a.accumulate(model):
            a.backward(model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        steps += a.sync_gradients
print(json.dumps([steps, sum("entered twice for a loader's last batch" in text for text in told)]))
"""
PLAIN = """
import json, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin

torch.manual_seed(0)
plain = torch.nn.Linear(4, 3)
adam = torch.optim.AdamW(plain.parameters())
plain(torch.ones(2, 4)).sum().backward()
adam.step()
a = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
model = torch.nn.Linear(4, 3)
model, optimizer = a.prepare(model, torch.optim.AdamW(model.parameters()))
model.load_state_dict(plain.state_dict())
optimizer.load_state_dict(adam.state_dict())
a.backward(model(torch.ones(2, 4)).sum())
for parameter in model.parameters():
    parameter.grad = None
a.save_state("saved")
optimizer.step()
found = a.get_state_dict(model, rank0_only=False)
print(json.dumps([torch.equal(found[name], each) for name, each in plain.state_dict().items()]))
"""


def test_a_gathered_loss_is_told_once_and_cores_own_gather_has_the_gradient(run_processes) -> None:
    requires, told, gradient = said(run_processes, CONTRAST, ours=True, processes=2)
    assert not requires
    assert told == ["[RANK 0] gather: its input requires a g"]
    assert gradient == [2.0, 2.0]


def test_parts_of_the_last_batch_end_windows_as_there_and_the_log_says_so(run_processes) -> None:
    assert said(run_processes, PARTS, ours=True) == [6, 1]


@pytest.mark.needs("accel-fsdp")
def test_plain_state_is_loaded_under_fsdp_2_and_saved_with_gradients_cleared_by_hand(
    run_processes, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said(run_processes, PLAIN, ours=True, processes=2) == [True, True]
