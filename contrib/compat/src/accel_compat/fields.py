"""The plugins' settings among the flags of `accelerate launch`, by the start of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["FIELDS", "MEGATRONS", "is_off"]

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "fsdp_": (
        "version",
        "offload_params",
        "min_num_params",
        "sharding_strategy",
        "reshard_after_forward",
        "auto_wrap_policy",
        "transformer_layer_cls_to_wrap",
        "backward_prefetch",
        "state_dict_type",
        "forward_prefetch",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "ignored_modules",
    ),
    "dynamo_": (
        "backend",
        "mode",
    ),
    "parallelism_config_": (
        "dp_replicate_size",
        "dp_shard_size",
        "tp_size",
        "cp_size",
        "cp_backend",
        "cp_comm_strategy",
        "sp_size",
        "sp_backend",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    ),
    "megatron_lm_": (
        "tp_degree",
        "use_custom_fsdp",
        "no_load_optim",
        "eod_mask_loss",
        "overlap_cpu_optimizer_d2h_h2d",
        "no_save_optim",
        "optimizer_cpu_offload",
        "use_precision_aware_optimizer",
        "decoder_last_pipeline_num_layers",
        "pp_degree",
        "num_micro_batches",
        "sequence_parallelism",
        "recompute_activations",
        "use_distributed_optimizer",
        "gradient_clipping",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "attention_backend",
        "expert_model_parallel_size",
        "context_parallel_size",
        "attention_dropout",
        "hidden_dropout",
        "attention_softmax_in_fp32",
        "expert_tensor_parallel_size",
        "calculate_per_token_loss",
        "use_rotary_position_embeddings",
    ),
}

_OURS: Final = (
    "tp_degree",
    "pp_degree",
    "num_micro_batches",
    "sequence_parallelism",
    "recompute_activations",
    "use_distributed_optimizer",
    "gradient_clipping",
    "expert_model_parallel_size",
    "context_parallel_size",
)
MEGATRONS: Final[Mapping[str, str]] = {
    name: {"decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage"}.get(name, name)
    for name in FIELDS["megatron_lm_"]
    if name not in _OURS
}
"""Fields that are megatron-core's own -> their names there, which says what it no longer has."""


def is_off(name: str, value: Any) -> bool:
    """Whether it is as Megatron-LM has it unasked, and so nothing to hand on."""
    return value is False and name != "attention_softmax_in_fp32"
