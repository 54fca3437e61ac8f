"""A save on the simulated device, whose memory is pinned by a stand-in: torch pins for none in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_testing import simulated

PIECE_BYTES = 256


class Stream:
    """A queue of the device, and a point in it: the host waits for it, the device never does."""

    waited = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        Stream.waited += 1


def stage() -> None:
    """Have what is saved go through pieces of PIECE_BYTES."""
    from accel_core.storage import layout

    layout.PIECE_BYTES = PIECE_BYTES  # type: ignore[misc]
    layout.can_pin = lambda device: device.type == "sim"  # type: ignore[assignment]
    layout._pinned = lambda size: torch.empty(size, dtype=torch.uint8)
    layout._stream = lambda device: Stream()  # type: ignore[assignment, return-value]


def pieces() -> list[tuple[bool, int, int]]:
    """Of awkward tensors: whether their bytes arrive, waits for pieces, and waits for anything else."""
    from accel_testing.simulated.device import simulate

    module = simulate("sim")
    stage()
    from accel_core.storage.layout import staged, staging_device
    from accel_core.storage.tensor_bytes import bytes_of

    whole = torch.arange(1000, dtype=torch.float32)
    awkward = [
        *(torch.tensor(3.0), torch.empty(0), torch.tensor([True, False, True]), torch.ones(5, 3).half()),
        *(
            whole,
            whole[:7].bfloat16(),
            whole.view(20, 50).T[:3, :4],
            torch.ones(3, dtype=torch.complex64).conj(),
        ),
        whole[:3].double(),
    ]
    found = []
    for tensors in (awkward, awkward[1:2], whole.split(10)):
        here = [each if number % 4 == 3 else each.to("sim") for number, each in enumerate(tensors)]
        device = staging_device({each.device for each in here})
        assert device == module.device()
        Stream.waited, before = 0, module.waits
        got = b"".join(bytes(part.numpy().data) for part in staged(here, device))
        found.append(
            (got == b"".join(map(bytes, map(bytes_of, tensors))), Stream.waited, module.waits - before)
        )
    return found


def of_two_devices() -> tuple[bool, int]:
    """Whether the bytes of two devices' tensors arrive; waits for the second one's, on another stream."""
    from accel_testing.simulated.device import simulate

    module = simulate("sim", devices=2)
    stage()
    from accel_core.storage.layout import staged

    tensors = [torch.full((50,), float(number)) for number in range(6)]
    here = [each.to(f"sim:{number % 2}") for number, each in enumerate(tensors)]
    before = module.waits
    got = b"".join(bytes(part.numpy().data) for part in staged(here, here[0].device))
    return got == b"".join(bytes(each.numpy().data) for each in tensors), module.waits - before


def cut_short() -> int:
    """Waits of the host once a save has ended in its first piece."""
    from accel_testing.simulated.device import simulate

    simulate("sim")
    stage()
    from accel_core.storage.layout import staged

    parts = staged([torch.ones(1000, device="sim")], torch.device("sim", 0), [])
    next(parts)
    before = Stream.waited
    try:
        parts.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        return Stream.waited - before
    return 0


def save(folder: str, wait: bool, pins: bool = True) -> tuple[bool, int]:
    """Whether what comes back equals what was saved; and whether the save went through pieces."""
    simulated.declare(Path(folder) / "plugins")
    from accel_core import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(device="sim")
    if pins:
        stage()
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(4, 30, device="sim")).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(Path(folder) / "here", wait=wait)
    before = [each.detach().cpu().clone() for each in (*model.parameters(), *model.buffers())]
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    accelerator.load_state(Path(folder) / "here")
    after = [each.detach().cpu() for each in (*model.parameters(), *model.buffers())]
    accelerator.end_training()
    return all(map(torch.equal, before, after)), Stream.waited


def pinned_by_saves(folder: str) -> list[int]:
    """Pieces pinned by a first save in the background, by a second, and by one after `free_memory`."""
    simulated.declare(Path(folder) / "plugins")
    from accel_core import Accelerator
    from accel_core.storage import layout

    accelerator = Accelerator(device="sim")
    stage()
    counts, pin = [0], layout._pinned
    layout._pinned = lambda size: (counts.append(counts.pop() + 1), pin(size))[1]
    model = accelerator.prepare(nn.Linear(30, 20))
    found = []
    for number in range(3):
        if number == 2:
            (model,) = accelerator.free_memory(model)
            model = accelerator.prepare(nn.Linear(30, 20))
        before = counts[0]
        accelerator.save_state(Path(folder) / f"save{number}", wait=False)
        accelerator.wait_for_checkpoint()
        found.append(counts[0] - before)
    accelerator.end_training()
    return found
