"""What each rank of the tests of plans does: train models that bring plans, or that words are written for."""

from __future__ import annotations

import os
import warnings

import grid_job
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
    "Llama4": {**MIXED, "config": "Llama4TextConfig", "intermediate_size_mlp": 24, "interleave_moe_layer_step": 1},
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
