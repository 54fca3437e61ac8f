"""Small models, and how one process trains them in plain torch: the judge of these tests. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_core import Accelerator, InitProcessGroupKwargs, ParallelismConfig
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_testing.patience import patience

TIMEOUT = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(30)))
SHARE = 4
VOCABULARY = 17


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(6, 16),
            Block(16),
            Block(16),
            nn.LayerNorm(16),
            nn.Linear(16, 3),
            nn.Linear(3, 3, bias=False),
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 7, 3, bias=False)
        self.norm = nn.GroupNorm(1, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.second(F.relu(self.first(x)))))
        return self.head(hidden.mean((2, 3)))


class Attending(nn.Module):
    """A pre-norm transformer block, causal."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """Tied embeddings, which are outside of any block."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(Attending(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("ones", torch.ones(width), persistent=False)

    def reset_parameters(self) -> None:
        self.ones.fill_(1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.ones)


MODELS: dict[str, type[nn.Module]] = {"mlp": MLP, "conv": ConvNet, "gpt": GPT}
BLOCKS = {"mlp": ("Block",), "conv": ("Conv2d",), "gpt": ("Attending",)}


def net(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[kind]()


def batch(kind: str, step: int, world: int = 2) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = SHARE * world
    if kind == "gpt":
        ids = torch.randint(0, VOCABULARY, (size, 9), generator=generator)
        return ids[:, :-1], ids[:, 1:]
    shape = (size, 6) if kind == "mlp" else (size, 2, 8, 8)
    return torch.randn(shape, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """SGD shows a gradient of another size, which AdamW alone would hide."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def plugin(kind: str, version: int, **options: Any) -> FullyShardedDataParallelPlugin:
    names = {} if "auto_wrap_policy" in options else {"transformer_cls_names_to_wrap": BLOCKS[kind]}
    return FullyShardedDataParallelPlugin(**{"fsdp_version": version, **names, **options})


def sized(**options: Any) -> list[Any]:
    """Return the config objects of options of section `fsdp` and of sizes of section `parallelism`."""
    sizes = {name: options.pop(name) for name in ("dp_replicate", "dp_shard", "pp") if name in options}
    return [FullyShardedDataParallelPlugin(**options), ParallelismConfig(**sizes)]


def accelerator(*configs: Any, **arguments: Any) -> Accelerator:
    return Accelerator(**{"device": "cpu", "strategy": "fsdp", "plugins": [TIMEOUT, *configs], **arguments})


def steps_of(run: Accelerator, model: nn.Module, optimizer: Any, kind: str, steps: range) -> Iterator[float]:
    """Train on this rank's share of each batch; the loss of all ranks, step by step."""
    rank, world, size = run.process_index, run.num_processes, run.gradient_accumulation_steps
    for step in steps:
        mean = 0.0
        for micro in range(size):
            x, y = (t[rank * SHARE :][:SHARE][micro::size].to(run.device) for t in batch(kind, step, world))
            with run.accumulate(model):
                loss = loss_of(model, x, y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            mean += run.reduce(loss.detach(), "mean").item() / size
        yield mean


def train_ours(
    kind: str, steps: int, options: dict[str, Any], **arguments: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and whole weights at the end; each rank begins with weights of its own."""
    run = accelerator(plugin(kind, **options), **arguments)
    model = net(kind, seed=run.process_index)
    model, optimizer = run.prepare(model, optimizer_of(model))
    losses = list(steps_of(run, model, optimizer, kind, range(steps)))
    weights = {name: tensor.clone() for name, tensor in run.get_state_dict(model, rank0_only=False).items()}
    run.end_training()
    return losses, weights


def train_plainly(kind: str, steps: int, world: int = 2) -> tuple[list[float], dict[str, Tensor]]:
    model = net(kind)
    optimizer = optimizer_of(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, *batch(kind, step, world))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distance(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """Largest difference of any element."""
    assert ours.keys() == plain.keys(), ours.keys() ^ plain.keys()
    return max((ours[name].double() - plain[name].double()).abs().max().item() for name in plain)
