"""What each rank of the tests of plans does: train models that bring plans, or that words are written for."""

from __future__ import annotations

import warnings
from functools import partial

import grid_job
import split_job
import torch
from torch import nn
from torch.nn import functional as F

from accel_core import Accelerator

SIZES = {
    "vocab_size": grid_job.WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DENSE = {
    "Llama": {},
    "Mistral": {},
    "Qwen3": {},
    "Gemma3": {"config": "Gemma3TextConfig"},
    "Phi3": {},
    "Olmo2": {},
}
MIXTURES = {
    "Mixtral": MIXED,
    "Qwen3Moe": MIXED,
    "GptOss": MIXED,
    "DeepseekV3": {**MIXED, **LATENT},
}
MORE = {
    "Llama4": {
        **MIXED,
        "config": "Llama4TextConfig",
        "intermediate_size_mlp": 24,
        "interleave_moe_layer_step": 1,
    },
    "GraniteMoeSWA": MIXED,
    "LongcatFlash": {
        **MIXED,
        **LATENT,
        "num_layers": 2,
        "expert_ffn_hidden_size": 8,
        "ffn_hidden_size": 24,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "Glm4": {},
}


def family(name, options):
    """A tiny model of a family of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        import transformers

        config = getattr(transformers, options.get("config", f"{name}Config"))
        asked = {**SIZES, **options}
        asked.pop("config", None)
        known = {key for kind in config.__mro__ for key in vars(kind).get("__annotations__", ())}
        known |= {*config.attribute_map}
        made = config(**{key: value for key, value in asked.items() if key in known})
        return getattr(transformers, f"{name}ForCausalLM")(made)


for _name, _options in {**DENSE, **MIXTURES, **MORE}.items():
    grid_job.MODELS[_name] = lambda name=_name, options=_options: family(name, options)


def all_of(function, names, *arguments):
    """What a function of the grids' finds for each model."""
    # Dynamo reads it of gathered weights.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    return {name: getattr(grid_job, function)(name, *arguments) for name in names}


def continued(sizes, folder, saves):
    """Losses after the third step, where a run saves or loads its state, and the last weights."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    case = {"sizes": sizes, "plan": None, "model": "Mixtral", "optimizer": "adamw"}
    return split_job.continued(case, folder, saves)


# -- a model for each word ------------------------------------------------------------------------

WIDTH, HEADS, EXPERTS = 8, 4, 4


class Body(nn.Module):
    """Words, a norm, a part that plans split, and an output."""

    def __init__(self, part):
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.part = part
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        return self.output(self.part(self.norm(self.words(words))))


class Mlp(nn.Module):
    """A hidden layer, whose gates and values may be one packed weight."""

    def __init__(self, packed=False):
        super().__init__()
        self.packed = packed
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH if packed else 2 * WIDTH, WIDTH)

    def forward(self, x):
        x = self.up(x)
        if self.packed:
            gate, x = x.chunk(2, dim=-1)
            x = gate.sigmoid() * x
        return self.down(x.tanh())


class Gated(nn.Module):
    """Heads that have a norm, a gate each, and a key that they share, as in latent attention."""

    qk_rope_head_dim = 2

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(WIDTH // HEADS)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.latent = nn.Linear(WIDTH, 4 + self.qk_rope_head_dim)
        self.kv_b_proj = nn.Linear(4, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, WIDTH // HEADS)))
        latent, key = self.latent(x).split([4, self.qk_rope_head_dim], dim=-1)
        q = q * key.unsqueeze(-2) + self.kv_b_proj(latent).view_as(q)
        return self.o_proj((q * self.sinks[:, None].sigmoid()).flatten(-2))


class Experts(nn.Module):
    """Stacked experts, (experts, outputs, inputs), or transposed as Llama 4 has them; one is the identity."""

    def __init__(self, transposed):
        super().__init__()
        self.transposed = transposed
        up, down = (EXPERTS, 2 * WIDTH, WIDTH), (EXPERTS, WIDTH, WIDTH)
        self.gate_up_proj = nn.Parameter(torch.randn((up[0], up[2], up[1]) if transposed else up) / 2)
        self.down_proj = nn.Parameter(torch.randn(down) / 2)
        self.identity = nn.Identity()

    def forward(self, tokens, chosen, weights):
        up, down = self.gate_up_proj[chosen], self.down_proj[chosen]
        up, down = (up, down) if self.transposed else (up.mT, down.mT)
        gate, value = (tokens[:, None] @ up).chunk(2, dim=-1)
        out = ((gate.tanh() * value) @ down).squeeze(1)
        return weights[:, None] * out + self.identity(tokens)


class Mixture(nn.Module):
    """A router and its experts, which take a weight as a keyword argument."""

    def __init__(self, transposed=False):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(transposed)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        out = self.experts(tokens, chosen, weights=weights)
        out += tokens  # in place, as Llama 4 adds to the output of a split layer
        return out.view_as(x)


_MLP = {"part.up": "colwise", "part.down": "rowwise"}
_HEADS = {
    "part.q_proj": "colwise",
    "part.q_norm": "replicated_with_grad_allreduce",
    "part.sinks": "colwise",
    "part": "local_params",
    "part.latent": "mla_kv_a_proj",
    "part.kv_b_proj": "colwise",
    "part.o_proj": "rowwise",
}
_EXPERTS = {
    "part.experts.gate_up_proj": "packed_colwise",
    "part.experts.down_proj": "rowwise",
    "part.experts.identity": "moe_identity_expert",
    "part.experts": "moe_tp_experts",
}
_LLAMA4 = {**_EXPERTS, "part.experts.gate_up_proj": "packed_rowwise", "part.experts.down_proj": "colwise"}
_SEQUENCE = {
    "words": {"style": "rowwise", "output": "sequence"},
    "norm": "sequence",
    "part": "gather",
    **_MLP,
    "output": "colwise_rep",
}
WORD_CASES = {
    "colwise": (Mlp, _MLP),
    "rowwise": (Mlp, _MLP),
    "colwise_rep": (Mlp, {"output": "colwise_rep"}),
    "colwise_gather_output": (Mlp, {"part.up": "colwise_gather_output"}),
    "rowwise_rep": (Mlp, {"part.up": "rowwise_rep"}),
    "rowwise_split_input": (Mlp, {"part.up": "colwise_rep", "part.down": "rowwise_split_input"}),
    "embedding_colwise": (Mlp, {"words": "embedding_colwise"}),
    "embedding_rowwise": (Mlp, {"words": "embedding_rowwise"}),
    "sequence": (Mlp, _SEQUENCE),
    "sequence_parallel": (Mlp, {**_SEQUENCE, "norm": "sequence_parallel"}),
    "gather": (Mlp, _SEQUENCE),
    "packed_colwise": (lambda: Mlp(packed=True), {"part.up": "packed_colwise", "part.down": "rowwise"}),
    "packed_rowwise": (lambda: Mixture(transposed=True), _LLAMA4),
    "replicated_with_grad_allreduce": (Gated, _HEADS),
    "local_params": (Gated, _HEADS),
    "mla_kv_a_proj": (Gated, _HEADS),
    "replicate": (Mlp, {**_MLP, "words": "replicate"}),
    "moe_tp_experts": (Mixture, _EXPERTS),
    "all_reduce": (Mixture, {**_EXPERTS, "part.experts": "all_reduce"}),
    "moe_identity_expert": (Mixture, _EXPERTS),
}


def word_model(word):
    torch.manual_seed(0)
    return Body(WORD_CASES[word][0]()).double()


def stepped(model, optimizer, backward, read):
    """The losses of three steps, and the last weights."""
    losses = []
    for step in range(3):
        words = torch.randint(0, WIDTH, (2, 4), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten().roll(1))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: value.detach().clone() for key, value in read().items()}


def plain_words(word):
    model = word_model(word)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return stepped(model, optimizer, torch.Tensor.backward, model.state_dict)


def split_words(words):
    """The same for each word, of a model whose own plan has it."""
    found = {}
    for word in words:
        run = Accelerator(cpu=True)
        model = word_model(word)
        model._tp_plan = WORD_CASES[word][1]
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        read = partial(run.get_state_dict, model, rank0_only=False)
        found[word] = stepped(model, optimizer, run.backward, read)
        run.end_training()
    return found
