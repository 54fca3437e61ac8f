"""Many small tensors: neighbours are read and written together, and come back to the bit."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from accel_core import Accelerator
from accel_core.storage.disk import Disk
from accel_core.storage.files import DataFile
from accel_core.storage.layout import _joined, _pieces
from accel_core.storage.opened import open_checkpoint
from accel_core.storage.tensor_bytes import bytes_of
from accel_core.storage.tensors import Checkpoint

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
)


class Many(nn.Module):
    """Three hundred small buffers of several dtypes, and some of odd shapes and strides."""

    def __init__(self, seed):
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        for number in range(300):
            size = 1 + number % 5
            values = torch.randint(0, 2, (size, 3), generator=made)
            self.register_buffer(f"b{number}", values.to(DTYPES[number // 20 % len(DTYPES)]))
        odd = torch.randn(4, 6, generator=made)
        for name, tensor in {
            "turned": odd.t(),
            "every_other": odd[:, ::2],
            "number": odd[0, 0].clone(),
            "empty": odd[:0],
            "conjugated": torch.complex(odd, odd).conj(),
            "negated": torch.complex(odd, odd).conj().imag,
            "large": torch.randn(200, 200, generator=made),
        }.items():
            self.register_buffer(name, tensor)


@pytest.mark.parametrize("wait", [True, False])
def test_small_tensors_come_back_to_the_bit_by_a_few_reads(tmp_path, monkeypatch, wait):
    accelerator = Accelerator(device="cpu")
    model = accelerator.prepare(Many(seed=1))
    accelerator.save_state(tmp_path / "ck", wait=wait)
    accelerator.wait_for_checkpoint()
    before = {name: bytes(bytes_of(tensor)) for name, tensor in model.state_dict().items()}
    for name, tensor in Many(seed=2).state_dict().items():
        model.get_buffer(name).copy_(tensor)
    reads = []
    read = DataFile.read
    monkeypatch.setattr(DataFile, "read", lambda *given: reads.append(read(*given)))
    accelerator.load_state(tmp_path / "ck")
    accelerator.end_training()
    assert {name: bytes(bytes_of(tensor)) for name, tensor in model.state_dict().items()} == before
    assert len(reads) < 100


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32, torch.uint4, torch.complex64])
def test_parts_that_are_written_together_are_the_bytes_of_each(dtype):
    base = torch.arange(96, dtype=torch.uint8).view(dtype)
    tensors = [base, base[:0], base[:1].view(()), *base.split(1)]
    if dtype is not torch.uint4:
        tensors += [base[::2], base.view(2, -1).t()]
    if dtype.is_complex:
        tensors += [base.conj(), base.conj().imag]
    joined = b"".join(bytes(bytes_of(part)) for part in _joined(tensors, _pieces(tensors)))
    assert joined == b"".join(bytes(bytes_of(tensor)) for tensor in tensors)


def calls(action):
    """How many Python functions run, and how often generators go on."""
    counted = 0

    def count(frame, event, argument):
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return counted


def calls_of_save_and_load(folder, parameters):
    """How many calls a second save, and a load of it, take with AdamW."""
    accelerator = Accelerator(device="cpu")
    model = nn.ParameterList(torch.zeros(8) for _ in range(parameters))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model:
        parameter.grad = torch.ones(8)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.prepare(model, optimizer)
    for name in ("first", "second"):
        accelerator.save_state(folder / name)
        accelerator.load_state(folder / name)
    saved = calls(lambda: accelerator.save_state(folder / "third"))
    loaded = calls(lambda: accelerator.load_state(folder / "third"))
    accelerator.end_training()
    return saved, loaded


def test_a_leaf_costs_few_calls(tmp_path):
    few, many = (calls_of_save_and_load(tmp_path / str(number), number) for number in (100, 300))
    saved, loaded = ((after - before) / (4 * 200) for before, after in zip(few, many, strict=True))
    assert saved < 12
    assert loaded < 18


def test_the_text_that_describes_tensors_is_not_kept_beside_them(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(Many(0))
    accelerator.save_state(tmp_path / "saved")
    accelerator.end_training()
    with open_checkpoint(Disk(tmp_path / "saved")) as opened:
        checkpoint = Checkpoint.with_tensors(opened)
    assert ("unit0", "model/b0") in checkpoint.tensors
    assert not any("tensors" in index for _, index in checkpoint.shares.values())
