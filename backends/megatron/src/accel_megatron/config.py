"""The options of section `megatron`, and checks which of them go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import fields, frozen

from accel_core import KwargsHandler, option

__all__ = ["SPELLINGS", "MegatronLMPlugin", "Sized"]


def _filled(kind: type) -> Callable[[Any], Any]:
    """None, by which others say that there is nothing, is an empty one."""
    return lambda value: kind(value or ())


SPELLINGS: Final[Mapping[str, str]] = {
    "tp_degree": "tp",
    "pp_degree": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
"""Megatron-LM's name of a size -> dimension of section `parallelism`."""


@frozen(kw_only=True)
class MegatronLMPlugin(KwargsHandler):
    """Options of splitting, scheduling and stepping models. Section `megatron`."""

    tp_degree: int | None = option(
        None, python_only=True, dimension="tp", help="Another spelling of parallelism.tp."
    )
    pp_degree: int | None = option(
        None, python_only=True, dimension="pp", help="Another spelling of parallelism.pp."
    )
    context_parallel_size: int | None = option(
        None, python_only=True, dimension="cp", help="Another spelling of parallelism.cp."
    )
    expert_model_parallel_size: int | None = option(
        None, python_only=True, dimension="ep", help="Another spelling of parallelism.ep."
    )
    num_micro_batches: int | None = option(
        None,
        minimum=1,
        help="Micro-batches that a batch given to model(**batch) is cut into; unset: the number of stages.",
    )
    gradient_clipping: float | None = option(
        None, help="Norm to clip gradients to at each step that clip_grad_norm_ asks nothing of."
    )
    sequence_parallelism: bool = option(
        False,
        help="Split what is between tensor-parallel layers along the sequence; needs parallelism.tp > 1.",
    )
    recompute_activations: bool = option(
        False, help="Compute attention again in backward instead of keeping its activations."
    )
    use_distributed_optimizer: bool = option(
        False, help="Split optimizer state and its step over the ranks that read different data."
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, minimum=1, help="Layers of each of several chunks a rank has; the interleaved schedule."
    )
    is_train_batch_min: bool = option(True, help="Taken and not needed: each batch has its own size.")
    train_iters: int | None = option(None, minimum=1, help="Optimizer steps of the whole training.")
    train_samples: int | None = option(None, minimum=1, help="Samples of the whole training.")
    weight_decay_incr_style: str = option(
        "constant", choices=("constant", "linear", "cosine"), help="How weight decay grows."
    )
    start_weight_decay: float | None = option(None, help="Weight decay at the start; unset: the optimizer's.")
    end_weight_decay: float | None = option(None, help="Weight decay at the end; unset: the optimizer's.")
    lr_decay_style: str = option(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root"), help="How the rate falls."
    )
    lr_decay_iters: int | None = option(None, minimum=1, help="Steps of the decay; unset: train_iters.")
    lr_decay_samples: int | None = option(None, minimum=1, help="Samples of it; unset: train_samples.")
    lr_warmup_iters: int | None = option(None, minimum=0, help="Steps of linear warmup.")
    lr_warmup_samples: int | None = option(None, minimum=0, help="Samples of linear warmup.")
    lr_warmup_fraction: float | None = option(None, help="Part of the decay that is linear warmup.")
    min_lr: float = option(0.0, help="The rate falls no lower.")
    no_wd_decay_cond: Any = option(
        None, python_only=True, help="(name, parameter) -> whether it is stepped without weight decay."
    )
    scale_lr_cond: Any = option(
        None, python_only=True, help="(name, parameter) -> whether its rate is multiplied by lr_mult."
    )
    lr_mult: float = option(1.0, help="What scale_lr_cond multiplies rates by.")
    return_logits: bool = option(False, help="model(**batch) gives logits too where it is given labels.")
    average_losses: bool = option(
        False, help="The loss of model(**batch) is the mean over ranks of other data, as in Megatron-LM."
    )
    custom_model_provider_function: Any = option(
        None, python_only=True, help="(pre_process, post_process, vp_stage) -> a megatron-core model."
    )
    custom_prepare_model_function: Any = option(
        None, python_only=True, help="Chunk of the model -> chunk, before it is wrapped."
    )
    custom_get_batch_function: Any = option(
        None, python_only=True, help="Iterator of micro-batches -> keyword arguments of the model."
    )
    custom_loss_function: Any = option(
        None, python_only=True, help="(what the model gave, its keyword arguments) -> 0-dim loss."
    )
    custom_train_step_class: Any = option(
        None, python_only=True, help="(these options, **kwargs) -> object with megatron-core's forward_step."
    )
    custom_train_step_kwargs: Mapping[str, Any] = option(
        {},
        converter=_filled(dict),
        python_only=True,
        help="What custom_train_step_class is made with.",
    )
    other_megatron_args: Mapping[str, Any] = option(
        {},
        converter=_filled(dict),
        help="Fields of megatron-core's transformer, optimizer and data-parallel configs, by name.",
    )
    megatron_dataset_flag: bool = option(
        False, help="Batches are of megatron-core's datasets: tokens, labels and loss_mask; or text."
    )
    custom_megatron_datasets_provider_function: Any = option(
        None, python_only=True, help="(samples to train, validate, test) -> datasets of indexed_loaders."
    )
    consumed_samples: Sequence[int] = option(
        (),
        converter=_filled(tuple),
        help="Samples of training, validation and test that indexed_loaders leaves out at the start.",
    )
    eval_iters: int = option(100, minimum=1, help="Batches that a pass of the validation loader has.")
    eval_interval: int = option(1000, minimum=1, help="Steps of training between two such passes.")
    seq_length: int | None = option(
        None, minimum=1, help="No sequence may be longer; unset: as the model has it."
    )
    encoder_seq_length: int | None = option(None, minimum=1, help="Another name of seq_length.")
    decoder_seq_length: int | None = option(
        None, minimum=1, help="No sequence of an input decoder_... may be longer; without one, no sequence."
    )
    pipeline_model_parallel_split_rank: Any = option(
        None, refused=True, help="megatron-core gives an encoder no stages of its own any more; leave it out"
    )
    tensorboard_dir: Any = option(
        None,
        refused=True,
        help="megatron-core writes no logs; use log_with: tensorboard, and project_dir",
    )
    set_all_logging_options: Any = option(
        None, refused=True, help="megatron-core writes no logs; use log_with and accelerator.log"
    )

    def __attrs_post_init__(self) -> None:
        """Refuse options that cannot be, or that would be ignored."""
        problem = next(filter(None, (check(self) for check in _CHECKS)), None)
        if problem:
            raise ValueError(problem)


@frozen(kw_only=True)
class Sized(MegatronLMPlugin):
    """The options of a run, with the sizes of section `parallelism` as whole numbers."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: MegatronLMPlugin, sizes: Mapping[str, int], ranks: int) -> Sized:
        """Return the options with sizes; -1 becomes the number of ranks that the others leave."""
        found = {name: sizes.get(name, 1) for name in ("tp", "pp", "ep")}
        fixed = math.prod(size for name, size in found.items() if name != "ep" and size != -1)
        rest = max(1, ranks // (fixed * max(1, sizes.get("dp_replicate", 1))))
        found |= {name: rest for name, size in found.items() if size == -1}
        options: dict[str, Any] = {it.name: getattr(config, it.name) for it in fields(MegatronLMPlugin)}
        return cls(**options | found)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that a batch given to the model is cut into."""
        return self.num_micro_batches or self.pp


Config = MegatronLMPlugin


def _steps(config: Config) -> str | None:
    if config.custom_train_step_kwargs and config.custom_train_step_class is None:
        return "custom_train_step_kwargs are of custom_train_step_class, which is not set; set both, or none"
    others = ("custom_get_batch_function", "custom_loss_function")
    other = next((name for name in others if getattr(config, name)), None)
    if config.custom_train_step_class is not None and other:
        return f"custom_train_step_class reads batches and computes losses itself; leave {other} out"
    if None not in (config.seq_length, config.encoder_seq_length):
        return "seq_length and encoder_seq_length are two names of one length; set one"
    if len(config.consumed_samples) > 3:
        return "consumed_samples are of training, validation and test; give three numbers at most"
    return None


def _schedule(config: Config) -> str | None:
    by_iters = ("train_iters", "lr_decay_iters", "lr_warmup_iters")
    by_samples = ("train_samples", "lr_decay_samples", "lr_warmup_samples")
    given = [[n for n in names if getattr(config, n) is not None] for names in (by_iters, by_samples)]
    if all(given):
        return f"{given[0][0]} counts steps and {given[1][0]} samples; give all of them in one"
    warmup = [n for n in ("lr_warmup_iters", "lr_warmup_samples") if getattr(config, n) is not None]
    if config.lr_warmup_fraction is not None and warmup:
        return f"lr_warmup_fraction and {warmup[0]} are two lengths of the warmup; set one"
    decay = (config.start_weight_decay, config.end_weight_decay)
    if config.weight_decay_incr_style == "constant" and decay[0] != decay[1]:
        return "start_weight_decay and end_weight_decay differ; set weight_decay_incr_style: linear or cosine"
    if config.weight_decay_incr_style != "constant" and None in decay:
        return (
            f"weight_decay_incr_style {config.weight_decay_incr_style} goes from start_weight_decay to"
            " end_weight_decay; set both"
        )
    if config.scale_lr_cond is None and config.lr_mult != 1.0:
        return "lr_mult multiplies the rates of what scale_lr_cond names; set scale_lr_cond too"
    return None


_CHECKS: Final = (_steps, _schedule)
