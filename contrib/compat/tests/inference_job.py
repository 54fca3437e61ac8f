"""What the processes of a pipeline do."""

from __future__ import annotations

import torch
from torch import nn

import accel_compat

accel_compat.install()

from accelerate import PartialState, prepare_pippy  # noqa: E402

from accel_compat import packages  # noqa: E402
from accel_core import PluginError  # noqa: E402


class Cache:
    """No tensor: transformers' decoders return such objects."""


class Net(nn.Module):
    """Numbers (B, 4) and a mask (B, 1) -> {"out": (B, 3)}."""

    def __init__(self, cached: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cached = cached
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x).relu()
        out = {"out": self.head(x) * (1 if mask is None else mask)}
        return out | {"past_key_values": Cache()} if self.cached else out


def inputs(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(rows, 4, generator=generator), "mask": torch.ones(rows, 1) / 2}


def staged(
    points, gather: bool, rows: int, chunks: int | None
) -> tuple[list[str], list[torch.Tensor | None]]:
    state = PartialState(cpu=True)
    model = prepare_pippy(
        Net().eval(), points, example_kwargs=inputs(2), num_chunks=chunks, gather_output=gather
    )
    given = inputs(rows)
    seen = []
    for _ in range(2):
        out = model(given["x"], mask=given["mask"]) if state.is_main_process else model()
        seen.append(None if out is None else out["out"])
    return model.hf_split_points, seen


def with_a_cache() -> list[str]:
    state = PartialState(cpu=True)
    model = prepare_pippy(Net(cached=True).eval(), ["blocks.2"], gather_output=True)
    return list(model(inputs(4)["x"]) if state.is_main_process else model())


def without_a_pipeline(points) -> str:
    PartialState(cpu=True)
    packages.import_module = lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name=name))
    try:
        prepare_pippy(Net(), points)
    except (PluginError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
