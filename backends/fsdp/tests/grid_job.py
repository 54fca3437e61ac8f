"""What each rank of test_fsdp_grids does: train on a mesh that variables describe."""

from __future__ import annotations

import json
import os
import warnings

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, AccelError

STEPS, BATCH, WORDS, LENGTH = 6, 8, 12, 4


class Block(nn.Module):
    """Attention and a hidden layer, as everybody writes them."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.head = width // heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "o")})
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.before(x)
        q, k, v = (
            self.attention[name](h).unflatten(-1, (-1, self.head)).transpose(1, 2) for name in ("q", "k", "v")
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["o"](mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.tanh(self.up(self.between(x))))


class Gpt(nn.Module):
    """Two blocks; tied: the output layer is the embedding."""

    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


GPT_PLAN = {
    "blocks.*.attention.[qkv]": "colwise",
    "blocks.*.attention.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


def llama():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def qwen():
    """A decoder whose attention has norms of each head's queries and keys."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


MODELS = {"gpt": Gpt, "untied": lambda: Gpt(tied=False), "llama": llama, "qwen": qwen}


def model_and_data(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    words = torch.randint(0, WORDS, (STEPS * BATCH, LENGTH + 1))
    return model, TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def loss_of(model, words, following):
    logits = model(words)
    return cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), following.flatten())


def optimizer_of(model, **options):
    # A bias of attention keys has no gradient but rounding, which Adam would make steps of.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **options)


def plain(name, clip, norm_type=2.0):
    """Losses, norms and final weights of plain PyTorch, a loop over global batches."""
    model, data = model_and_data(name)
    optimizer, losses, norms = optimizer_of(model), [], []
    for words, following in DataLoader(data, BATCH):
        loss = loss_of(model, words, following)
        loss.backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {key: value.tolist() for key, value in model.state_dict().items()}


def trained(name, clip, norm_type=2.0, *, sums=False, **options):
    """The same on this run's mesh; `sums`: of losses that are sums over words."""
    accelerator = Accelerator(cpu=True)
    topology = accelerator.run.topology
    model, data = model_and_data(name)
    if topology.reader or os.environ.get("RANK") != "0":  # only the first rank's weights count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    loader = DataLoader(data, BATCH // topology.readers)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model, **options), loader)
    losses, norms = [], []
    count = (lambda batch: batch[0].numel()) if sums else None
    for window in accelerator.windows(loader, model, items=count):
        for words, following in window:
            loss = loss_of(model, words, following)
            accelerator.backward(loss * (words.numel() if sums else 1))
            if clip:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), clip, norm_type).item())
            optimizer.step()
            optimizer.zero_grad()
        whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        losses.append(accelerator.reduce(whole.detach(), "mean").item())
    weights = {
        key: value.tolist() for key, value in accelerator.get_state_dict(model, rank0_only=False).items()
    }
    shapes = {
        key: tuple(p.to_local().shape) if hasattr(p, "to_local") else tuple(p.shape)
        for key, p in model.named_parameters()
    }
    accelerator.end_training()
    return losses, norms, weights, shapes


def prepared(name):
    """Whether it can be prepared at all."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(MODELS[name]())


def written_while_whole(name):
    """The weights that do not hold what was written to them in `full_parameters`."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(MODELS[name]())
    with accelerator.full_parameters(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    state = accelerator.get_state_dict(model, rank0_only=False)
    accelerator.end_training()
    return [key for key, value in state.items() if value.flatten().tolist() != list(range(value.numel()))]


def built_on_meta(name):
    """What the ranks hold of what is not split, built from other seeds."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    with accelerator.model_init_context():
        model = MODELS[name]()
    model = accelerator.prepare(model)
    found = {
        key: (p.to_local() if hasattr(p, "to_local") else p).tolist() for key, p in model.named_parameters()
    }
    accelerator.end_training()
    return found


def frozen(name):
    """The parameters of a frozen model that train after `prepare`."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(MODELS[name]().requires_grad_(False))
    found = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    accelerator.end_training()
    return found


def overflowed(name):
    """Whether each of two optimizers skips its step when one rank's part of a split layer overflows."""
    accelerator = Accelerator(cpu=True)
    model, data = model_and_data(name)
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model.blocks]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    words, following = next(iter(DataLoader(data, BATCH)))
    accelerator.backward(loss_of(model, words, following))
    if accelerator.process_index == accelerator.num_processes - 1:
        model.blocks[1].up.weight.grad.to_local().fill_(float("inf"))
    for optimizer in optimizers:
        optimizer.step()
    found = [optimizer.step_was_skipped for optimizer in optimizers]
    accelerator.end_training()
    return found


def stepped(name):
    """What the first step says."""
    accelerator = Accelerator(cpu=True)
    model, data = model_and_data(name)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    try:
        accelerator.backward(loss_of(model, *data[: BATCH // accelerator.run.topology.readers]))
        optimizer.step()
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()


class Outshone(Gpt):
    """One parameter has a gradient ten thousand times as long as the others'."""

    def __init__(self):
        super().__init__(tied=False)
        self.loud = nn.Parameter(torch.zeros(4))

    def forward(self, words):
        return super().forward(words) + 1e4 * self.loud.sum()


MODELS["outshone"] = Outshone


def stepped_until(kind):
    """What a step says; four steps with a final norm that the plan may forget."""
    accelerator = Accelerator(cpu=True)
    model, data = model_and_data("outshone" if kind == "outshone" else "gpt")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def closure():
        loss = loss_of(model, *data[: BATCH // accelerator.run.topology.readers])
        accelerator.backward(loss if kind != "outshone" else loss + model(data[0][0][None])[0, 0, 0])
        return loss

    try:
        for _ in range(4):
            optimizer.step(closure) if kind == "closure" else (closure(), optimizer.step())
            optimizer.zero_grad()
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()


def saved(name, folder, steps):
    """Train some steps, save, and give what the rest of the training gives."""
    return _continued(name, folder, steps, load=False)


def resumed(name, folder, steps):
    """Load, and train the rest."""
    return _continued(name, folder, steps, load=True)


def _continued(name, folder, steps, *, load):
    accelerator = Accelerator(cpu=True)
    model, data = model_and_data(name)
    loader = DataLoader(data, BATCH // accelerator.run.topology.readers)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    if load:
        accelerator.load_state(folder)
    losses = []
    for words, following in loader:
        loss = loss_of(model, words, following)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if not load and len(losses) == steps:
            accelerator.save_state(folder)
    accelerator.end_training()
    return losses


def environment(sizes, plan=None, **more):
    """Variables for `dp_replicate 2, tp 2` and the like."""
    variables = {"ACCEL__STRATEGY": "fsdp"}
    variables |= {f"ACCEL__PARALLELISM__{name.upper()}": str(size) for name, size in sizes.items()}
    if "tp" in sizes and plan is not None:
        variables["ACCEL__TENSOR_PARALLEL__PARALLELIZE_PLAN"] = json.dumps(plan)
    return variables | more
