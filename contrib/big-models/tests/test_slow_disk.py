"""A disk that is slower than the forward changes no number."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file
from torch import nn

from accel_big_models import empty_weights, load
from accel_big_models.hooks import enters_of
from accel_big_models.planning import plan_from_map

simulated = pytest.importorskip("accel_testing.simulated.device")


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    try:
        simulated.simulate()
    except simulated.AccelError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        yield
    torch.__future__.set_swap_module_params_on_conversion(before)


class Chosen(nn.Module):
    """Computes the blocks that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, numbers):
        for number in numbers:
            x = self.blocks[number](x)
        return x


def test_a_block_that_is_read_for_nothing_overwrites_no_other(tmp_path):
    whole = Chosen()
    save_file(whole.state_dict(), tmp_path / "weights.safetensors")
    with empty_weights():
        target = Chosen()
    places = evolve(plan_from_map(target, {"": "cpu", "blocks.1": "disk"}), device=torch.device("sim:0"))
    load(target, tmp_path / "weights.safetensors", places)
    x = torch.randn(2, 8)
    target(x, range(4))
    goes_on = threading.Event()

    def on(*_):
        goes_on.set()
        engine.mover.reader.submit(int).result()

    engine = next(enter.engine for enter in enters_of(target) if enter.engine is not None)
    target.blocks[2].register_forward_hook(on)
    engine.mover.reader.submit(goes_on.wait, 60)
    torch.testing.assert_close(target(x, [0, 2, 3]), whole(x, [0, 2, 3]))
