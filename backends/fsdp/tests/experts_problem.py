"""What each rank of test_fsdp_experts does: the grids' training, of models with stacks of experts."""

from __future__ import annotations

import warnings

import grid_job
import torch
from torch import nn

from accel_core import Accelerator

EXPERTS, WIDTH = 4, 8


class Grouped(nn.Module):
    """As torchtitan's: rows grouped by expert, and how many each expert gets."""

    def __init__(self, experts=EXPERTS):
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(experts, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 3)

    def forward(self, rows, counts):
        parts = rows.split(counts.tolist())
        assert len(parts) == self.num_experts == len(self.up)
        done = [
            torch.tanh(part @ self.up[expert] + self.bias[expert]) @ self.down[expert]
            for expert, part in enumerate(parts)
        ]
        return torch.cat(done)


class Chosen(Grouped):
    """As transformers': tokens, their experts, and these experts' weights."""

    def forward(self, tokens, experts, weights):
        out = torch.zeros_like(tokens)
        for expert in experts.unique().tolist():
            token, slot = (experts == expert).nonzero(as_tuple=True)
            hidden = torch.tanh(tokens[token] @ self.up[expert] + self.bias[expert])
            out = out.index_add(0, token, hidden @ self.down[expert] * weights[token, slot, None])
        return out


class Layer(nn.Module):
    """A router, its experts, and a hidden layer that every token takes."""

    def __init__(self, kind=Chosen):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = kind()
        self.shared_experts = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, experts = self.router(tokens).softmax(-1).topk(2)
        if isinstance(self.experts, Chosen):
            mixed = self.experts(tokens, experts, weights=weights)
        else:
            order = experts.flatten().argsort(stable=True)
            counts = experts.flatten().bincount(minlength=EXPERTS)
            rows = self.experts(tokens[order // 2], counts) * weights.flatten()[order, None]
            mixed = torch.zeros_like(tokens).index_add(0, order // 2, rows)
        return x + (mixed + self.shared_experts(tokens)).view_as(x)


class Moe(nn.Module):
    """Two layers of experts between attention."""

    def __init__(self, kind=Chosen):
        super().__init__()
        self.embedding = nn.Embedding(grid_job.WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(grid_job.Block(), Layer(kind)) for _ in range(2))
        self.output = nn.Linear(WIDTH, grid_job.WORDS, bias=False)

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class OneSided(Moe):
    """All tokens go to the first two experts, so that a rank gets none."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for block in self.blocks:
                block[1].router.bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
                block[1].router.weight.mul_(0.01)


class Listed(nn.Module):
    """Experts in a list."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))


class Dense(nn.Module):
    """A module called experts that is none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(WIDTH, WIDTH)


class Called(nn.Module):
    """Experts that are called in a way of their own."""

    def __init__(self):
        super().__init__()
        self.experts = Grouped()

    def forward(self, x):
        return self.experts(x, "all")


def mixtral():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=grid_job.WORDS,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        tie_word_embeddings=False,
    )
    return MixtralForCausalLM(config)


grid_job.MODELS |= {
    "chosen": Moe,
    "grouped": lambda: Moe(Grouped),
    "one-sided": OneSided,
    "mixtral": mixtral,
    "listed": Listed,
    "dense": Dense,
    "called": Called,
}


def job(name, *arguments):
    """Do that job of the grids', with these models too."""
    return getattr(grid_job, name)(*arguments)


def trained(name, clip, norm_type, options):
    # dynamo reads it of gathered weights
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    return grid_job.trained(name, clip, norm_type, **options)


def called(name):
    """What a call says that is none of experts."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(grid_job.MODELS[name]())
    model(torch.ones(2, WIDTH))


def loaded_by_one():
    """The same training, of a model whose weights only the first rank has."""
    build = grid_job.MODELS["chosen"]

    def empty():
        build()
        drawn = torch.get_rng_state()  # data must be the same on ranks that build nothing
        torch.manual_seed(0)
        with accelerator.model_init_context():
            model = build()
        torch.set_rng_state(drawn)
        return model

    accelerator = Accelerator(cpu=True)
    grid_job.MODELS["chosen"] = empty
    try:
        return grid_job.trained("chosen", 0.1)
    finally:
        grid_job.MODELS["chosen"] = build
        accelerator.end_training()


def piped():
    """Losses and final weights of a pipeline whose stages have experts."""
    accelerator = Accelerator(cpu=True)
    readers = accelerator.run.topology.readers
    model, data = grid_job.model_and_data("chosen")
    loader = torch.utils.data.DataLoader(data, grid_job.BATCH // readers // 2)
    model, optimizer, loader = accelerator.prepare(model, grid_job.optimizer_of(model), loader)
    batches, losses = iter(loader), []
    for _ in range(grid_job.STEPS):
        step = accelerator.forward_backward(model, batches, loss_and_nothing, microbatches=2)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(step.loss, "mean").item())
    weights = {name: weight.tolist() for name, weight in accelerator.iter_weights(model)}
    accelerator.end_training()
    return losses, weights


def loss_and_nothing(model, batch):
    return grid_job.loss_of(model, *batch), None
