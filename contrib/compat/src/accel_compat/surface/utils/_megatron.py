"""MegatronLMPlugin as Accelerate has it: fields that the environment fills; what runs is accel-megatron."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from accel_compat.fields import MEGATRONS, is_off
from accel_compat.translating import Translated

from .environment import str_to_bool

_FILLED: Final[Mapping[str, Any]] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "use_custom_fsdp": False,
    "no_load_optim": False,
    "eod_mask_loss": False,
    "no_save_optim": False,
    "optimizer_cpu_offload": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "use_precision_aware_optimizer": False,
    "num_micro_batches": 1,
    "gradient_clipping": 1.0,
    "recompute_activations": False,
    "use_distributed_optimizer": False,
    "sequence_parallelism": False,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "attention_backend": True,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "expert_tensor_parallel_size": 1,
    "calculate_per_token_loss": True,
    "use_rotary_position_embeddings": True,
}
"""Field that a MEGATRON_LM_ variable fills -> what it says where neither is given."""

_STEPS: Final = (
    "custom_train_step_class",
    "custom_train_step_kwargs",
    "custom_get_batch_function",
    "custom_loss_function",
)
"""Fields that a train step is made of, in Megatron-LM's words."""


@dataclass
class MegatronLMPlugin(Translated):
    """How Megatron trains; what is not given comes from MEGATRON_LM_ variables."""

    ours: ClassVar[str] = "accel_megatron:MegatronLMPlugin"

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._given = {name for name in _FILLED if getattr(self, name) is not None or _named(name)}
        for name, default in _FILLED.items():
            if getattr(self, name) is None:
                setattr(self, name, _read(name, default))
        layers = _named("decoder_last_pipeline_num_layers")
        if self.decoder_last_pipeline_num_layers is None and layers:
            self.decoder_last_pipeline_num_layers = int(layers)
        if self.consumed_samples is not None:
            self.consumed_samples += [0] * (3 - len(self.consumed_samples))  # one each of train, eval, test

    def translation(self) -> dict[str, Any]:
        """What was given, a value that is the default's too: ours are not all the same."""
        given = {**super().translation(), **{name: getattr(self, name) for name in self._given}}
        given.setdefault("gradient_clipping", self.gradient_clipping)  # Accelerate clips unasked
        if any(getattr(self, name) is not None for name in _STEPS):
            given = {name: value for name, value in given.items() if name not in _STEPS}
            given["custom_train_step_class"] = self._chosen()
        more = {name: given.pop(name) for name in list(given) if name in MEGATRONS}
        more = {MEGATRONS[name]: value for name, value in more.items() if not is_off(name, value)}
        if more:
            given["other_megatron_args"] = {**more, **given.get("other_megatron_args", {})}
        return given

    def _chosen(self) -> Any:
        from .megatron_lm import ChosenStep

        if self.return_logits:
            raise ValueError(
                "return_logits: a train step's model gives losses, and no logits\n"
                "put logits under that name into the dict that its loss function gives"
            )
        return partial(ChosenStep, self)

    def to_ours(self) -> object:
        """The same settings, as an object of ours; what is set later are `news`."""
        self._said = self.translation()
        return super().to_ours()

    def news(self) -> dict[str, Any]:
        """What was set since, by the names of ours."""
        said = self.__dict__.get("_said", {})
        return {
            name: value
            for name, value in self.translation().items()
            if name not in said or said[name] != value
        }


def _named(name: str) -> str | None:
    return os.environ.get(f"MEGATRON_LM_{name.upper()}")


def _read(name: str, default: Any) -> Any:
    text = _named(name)
    if text is None:
        return default
    return str_to_bool(text) == 1 if isinstance(default, bool) else type(default)(text)
