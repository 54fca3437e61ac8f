"""A small model with ties, buffers and blocks, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Sequential(nn.GELU(), nn.Linear(4 * width, width))
        self.gain = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        # One weight is used without a call of its module.
        return x + self.gain * nn.functional.linear(
            self.second[0](self.first(self.norm(x))), self.second[1].weight
        )


class Model(nn.Module):
    """Token ids (B, S) -> logits (B, S, 50); an embedding that the head shares, a weight of its own."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1) * 1.5)
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3.0))
        self.register_buffer("frequencies", torch.arange(width) / width, persistent=False)

    def forward(self, ids, fail_at=None):
        x = self.embedding(ids) * self.scale + self.frequencies.to(self.scale.dtype) + self.steps
        for number, block in enumerate(self.blocks):
            if number == fail_at:
                raise ValueError("asked to fail")
            x = block(x)
        return self.head(self.norm(x))


def model(seed: int = 0, **options) -> Model:
    torch.manual_seed(seed)
    made = Model(**options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(seed))


def shards(folder: Path, source: nn.Module, count: int = 3, dtype: torch.dtype | None = None) -> Path:
    """Write a checkpoint as transformers does: shards and an index, tied weights once."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    if dtype is not None:
        weights = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()
        }
    homes = {}
    for number in range(count):
        part = dict(list(weights.items())[number::count])
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, folder / name)
        homes |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return folder
