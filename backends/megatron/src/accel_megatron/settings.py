"""Options of run and plugin in the words of megatron-core's config classes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import torch

from accel_core import ConfigError
from accel_megatron import float8
from accel_megatron.library import quiet

if TYPE_CHECKING:
    from accel_core import Run
    from accel_megatron.config import Sized

__all__ = [
    "data_parallel_settings",
    "optimizer_settings",
    "refuse_scaler",
    "refuse_unknown",
    "transformer_settings",
]

_FUSED: Final = (
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
"""Kernels of apex and CUDA extensions, off unless other_megatron_args sets them."""
_OURS: Final[Mapping[str, str]] = {
    "tensor_model_parallel_size": "parallelism.tp",
    "pipeline_model_parallel_size": "parallelism.pp",
    "virtual_pipeline_model_parallel_size": "num_layers_per_virtual_pipeline_stage",
    "context_parallel_size": "parallelism.cp",
    "expert_model_parallel_size": "parallelism.ep",
    "expert_tensor_parallel_size": "parallelism.tp, or 1 with parallelism.ep",
    "sequence_parallel": "sequence_parallelism",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "clip_grad": "gradient_clipping",
    "bf16": "mixed_precision of the run",
    "fp16": "mixed_precision of the run",
    "params_dtype": "mixed_precision of the run",
    "lr": "the prepared optimizer",
    "weight_decay": "the prepared optimizer",
    "optimizer": "the prepared optimizer",
    "adam_beta1": "the prepared optimizer",
    "adam_beta2": "the prepared optimizer",
    "adam_eps": "the prepared optimizer",
    "decoupled_weight_decay": "the prepared optimizer",
    "calculate_per_token_loss": "accelerator.windows(items=...)",
    "num_layers": "the model",
    "hidden_size": "the model",
    "num_attention_heads": "the model",
    "num_query_groups": "the model",
    "kv_channels": "the model",
    "ffn_hidden_size": "the model",
    "normalization": "the model",
    "gated_linear_unit": "the model",
    "add_bias_linear": "the model",
    "use_megatron_fsdp": "strategy fsdp",
    "fp8": "mixed_precision: fp8-te and section fp8_te",
    "fp8_recipe": "mixed_precision: fp8-te and section fp8_te",
    "fp8_margin": "section fp8_te",
    "fp8_amax_history_len": "section fp8_te",
    "fp8_amax_compute_algo": "section fp8_te",
}
"""Fields that another setting says -> which."""


def refuse_unknown(config: Sized) -> Iterable[str]:
    """Problems of `other_megatron_args`."""
    if not config.other_megatron_args:
        return
    known = {name for kind in _classes() for name in _names(kind)}
    for name in config.other_megatron_args:
        if name in _OURS:
            yield f"other_megatron_args.{name}: this is said by {_OURS[name]}; leave it out"
        elif name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            yield f"other_megatron_args.{name}: megatron-core's configs have no such field{hint}"
    needed = (config.use_distributed_optimizer, config.other_megatron_args.get("overlap_grad_reduce"))
    if config.other_megatron_args.get("overlap_param_gather") and not all(needed):
        yield (
            "other_megatron_args.overlap_param_gather: it needs use_distributed_optimizer, and"
            " overlap_grad_reduce beside it\nset both, or leave it out"
        )


def _classes() -> tuple[Any, Any, Any]:
    with quiet():
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer import TransformerConfig
    return TransformerConfig, DistributedDataParallelConfig, OptimizerConfig


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _chosen(config: Sized, number: int) -> dict[str, Any]:
    """Entries of `other_megatron_args` that are fields of the class of that number."""
    names = _names(_classes()[number])
    return {name: value for name, value in config.other_megatron_args.items() if name in names}


def of_layers(config: Sized) -> list[str]:
    """Entries of `other_megatron_args` about the layers of megatron-core."""
    layers, *others = map(_names, _classes())
    return [name for name in config.other_megatron_args if name in layers.difference(*others)]


def precision(run: Run) -> dict[str, Any]:
    """Return the dtypes that weights are computed with."""
    dtypes = {"bf16": torch.bfloat16, float8.PRECISION: torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(run.stack.precision.name, torch.float32)
    return {"bf16": dtype is torch.bfloat16, "fp16": dtype is torch.float16, "params_dtype": dtype}


def transformer_settings(run: Run, config: Sized, virtual: int | None) -> dict[str, Any]:
    """Arguments of TransformerConfig that choose kernels, and leave the results as they are."""
    made: dict[str, Any] = {
        "tensor_model_parallel_size": config.tp,
        "pipeline_model_parallel_size": config.pp,
        "virtual_pipeline_model_parallel_size": virtual,
        # Batched, two ranks of the interleaved schedule would mix up messages for several chunks.
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "expert_model_parallel_size": config.ep,
        "sequence_parallel": config.sequence_parallelism,
        "recompute_granularity": "selective" if config.recompute_activations else None,
        "pipeline_dtype": precision(run)["params_dtype"],
        **precision(run),
        **float8.fields(run),
        **dict.fromkeys(_FUSED, False),
    }
    return made | _chosen(config, 0)


def data_parallel_settings(config: Sized) -> dict[str, Any]:
    """Arguments of DistributedDataParallelConfig."""
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        **_chosen(config, 1),
    }


def optimizer_settings(run: Run, config: Sized) -> dict[str, Any]:
    """Arguments of OptimizerConfig, without the prepared optimizer's own hyperparameters.

    Nothing is clipped unasked.
    """
    return {
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "clip_grad": 0.0,
        **precision(run),
        **_loss_scale(run),
        **_chosen(config, 2),
    }


def _loss_scale(run: Run) -> dict[str, Any]:
    """Section grad_scaler in megatron-core's words.

    As torch's, the scale falls at the first overflow.
    """
    if run.config.mixed_precision != "fp16":
        return {}
    scaler = run.config.grad_scaler
    return {
        "initial_loss_scale": scaler.init_scale,
        "loss_scale_window": scaler.growth_interval,
        "hysteresis": 1,
    }


def refuse_scaler(run: Run) -> Iterable[str]:
    """Options of section grad_scaler that megatron-core's loss scale does not have."""
    fixed = {"growth_factor": 2.0, "backoff_factor": 0.5, "enabled": True}
    for name, value in fixed.items() if run.config.mixed_precision == "fp16" else ():
        if (asked := getattr(run.config.grad_scaler, name)) != value:
            yield f"grad_scaler.{name} is {asked}, and megatron-core's is always {value}\nleave it out"


def build(run: Run, config: Sized, virtual: int | None, **what: Any) -> Any:
    """Return a TransformerConfig.

    what: the model's own arguments, over which `other_megatron_args` go.

    Raises:
        ConfigError: megatron-core cannot have it so.
    """
    kind = _classes()[0]
    try:
        with quiet():
            made = kind(**(what | transformer_settings(run, config, virtual)))
    except (AssertionError, ValueError) as error:  # its own checks
        about = f"megatron-core refuses this model and layout: {error}"
        raise ConfigError(f"{about}\nchange the sizes or degrees that it names") from error
    if reason := float8.of_config(run, made):
        raise ConfigError(reason)
    return made
