"""The plugins' settings among the flags of `accelerate launch`, by the start of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["FIELDS", "MEGATRONS", "described", "is_off"]

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


HELP: Final[Mapping[str, str]] = {
    "module": "The script is a module's name, as of `python -m`.",
    "cpu": "Run on the CPU.",
    "config_file": "YAML or JSON that `accelerate config` wrote; default: the one in its cache.",
    "num_processes": "Processes on all machines together.",
    "num_machines": "Machines.",
    "machine_rank": "Number of this machine, from 0.",
    "main_process_ip": "Address of machine 0.",
    "main_process_port": "Free port of machine 0; 0: any.",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS of each process.",
    "max_restarts": "How often to start all workers again after one failed.",
    "gpu_ids": "Numbers of the devices to use, with commas; or all.",
    "mixed_precision": "no, fp16, bf16.",
    "enable_cpu_affinity": "Bind processes to the CPUs near their device (accel-cuda).",
    "use_fsdp": "Shard models by FSDP.",
    "use_deepspeed": "Train by DeepSpeed.",
    "use_megatron_lm": "Train by megatron-core.",
    "use_parallelism_config": "Lay the run out by the parallelism_config flags.",
    "debug": "Compare shapes before each collective, and say where it was called.",
    "no_python": "Refused: workers are Python programs.",
    "deepspeed_config_file": "DeepSpeed's own JSON.",
    "zero_stage": "DeepSpeed: 0, 1, 2 or 3.",
    "offload_optimizer_device": "DeepSpeed: none, cpu or nvme.",
    "offload_param_device": "DeepSpeed: none, cpu or nvme.",
    "offload_optimizer_nvme_path": "DeepSpeed: a folder.",
    "offload_param_nvme_path": "DeepSpeed: a folder.",
    "gradient_accumulation_steps": "DeepSpeed only: micro-batches of a step.",
    "gradient_clipping": "DeepSpeed only: the norm of gradients that stays.",
    "zero3_init_flag": "DeepSpeed, stage 3: true to build models in parts.",
    "zero3_save_16bit_model": "DeepSpeed, stage 3: true to gather weights for a save.",
    "deepspeed_moe_layer_cls_names": "DeepSpeed: classes of layers of experts, with commas.",
    "dynamo_backend": "Compile models by torch.compile with this backend; no: not.",
    "dynamo_mode": "default, reduce-overhead, max-autotune.",
    "dynamo_use_fullgraph": "One graph, or an error.",
    "dynamo_use_dynamic": "Compile for any shapes.",
    "dynamo_use_regional_compilation": "Compile repeated blocks once.",
}
_OWNERS: Final[Mapping[str, str]] = {
    "fsdp_": "FullyShardedDataParallelPlugin",
    "megatron_lm_": "MegatronLMPlugin",
    "parallelism_config_": "ParallelismConfig",
}


def described(name: str, others: Mapping[str, str]) -> str:
    """The help of a flag; of what has no meaning here (`others`) the reason."""
    if name in others:
        return f"Means nothing here: {others[name]}".replace("%", "%%")
    owner = next((start for start in _OWNERS if name.startswith(start)), None)
    return HELP[name] if owner is None else f"`{name[len(owner) :]}` of {_OWNERS[owner]}."
