"""Values for DeepSpeed's "auto", known at `prepare`, and checks against the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accel_core import ConfigError
from accel_deepspeed import settings
from accel_deepspeed.checking import check
from accel_deepspeed.placeholders import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from accel_core import GradScalerKwargs, Unit
    from accel_deepspeed.config import DeepSpeedPlugin

__all__ = ["complete", "engine_settings"]

Values = dict[str, tuple[Any, str]]


def complete(config: DeepSpeedPlugin, unit: Unit, loaders: Sequence[Any]) -> dict[str, Any]:
    """DeepSpeed's settings of a unit, without any "auto".

    Raises:
        ConfigError: with all that does not match the run or the objects, or cannot be filled in.
    """
    made, run = config.deepspeed_config, unit.run
    if not any(isinstance(optimizer, DummyOptim) for optimizer in unit.optimizers):
        made.pop("optimizer", None)  # refused below if another optimizer is prepared: no model trains by it
    for name in ("fp16", "bf16"):
        made.setdefault(name, {}).setdefault("enabled", settings.AUTO)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        made.setdefault(key, settings.AUTO)
    problems = [*_of_objects(config.deepspeed_config, unit)]
    problems += settings.fill(made, _of_run(config, unit, made, loaders))
    made.setdefault("gradient_clipping", settings.AUTO)
    unasked = {"gradient_clipping": (config.clip_unasked, "clip_unasked")}
    settings.fill(made, _of_model(unit) | _of_placeholders(unit) | unasked | _NEUTRAL, must_match=False)
    if left := settings.autos(made):
        problems.append(f"nothing says what to fill in for {', '.join(left)}; give numbers")
    if run.config.mixed_precision == "fp16":
        problems += _scale(made["fp16"], run.config.grad_scaler)
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            f"the DeepSpeed config of unit {unit.name!r} does not fit what is prepared:{listed}\n"
            'set these keys to "auto" in hf_ds_config, or change the other side',
            problems=problems,
        )
    return made


_NEUTRAL: Values = {
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (False, "nobody"),
    "zero_optimization.offload_optimizer.device": ("none", "nobody"),
    "zero_optimization.offload_param.device": ("none", "nobody"),
}


def _of_run(config: DeepSpeedPlugin, unit: Unit, made: Mapping[str, Any], loaders: Sequence[Any]) -> Values:
    run, steps = unit.run, unit.window.size
    precision = run.config.mixed_precision
    size, origin = _batch_size(config, unit, made, loaders)
    return {
        "gradient_accumulation_steps": (steps, "the run (gradient_accumulation_steps)"),
        "train_micro_batch_size_per_gpu": (size, origin),
        "train_batch_size": (
            size * steps * run.topology.readers,
            f"{size} a reader ({origin}) x {steps} micro-batches x {run.topology.readers} readers",
        ),
        "fp16.enabled": (precision == "fp16", f"the run (mixed_precision {precision})"),
        "bf16.enabled": (precision == "bf16", f"the run (mixed_precision {precision})"),
    }


def _batch_size(
    config: DeepSpeedPlugin, unit: Unit, made: Mapping[str, Any], loaders: Sequence[Any]
) -> tuple[int, str]:
    """Return the number of samples in a reader's micro-batch.

    Only DeepSpeed's own sample counter looks at it.
    """
    run = unit.run
    sizes = [size for loader in (loaders or run.prepared.loaders) if (size := _samples(loader)) is not None]
    if not sizes:
        there = made["train_micro_batch_size_per_gpu"]
        return (1, "no loader") if there == settings.AUTO else (there, "the DeepSpeed config")
    size = min(sizes) if config.is_train_batch_min else max(sizes)
    if run.config.data.split_batches:
        return size // run.topology.readers, "the prepared loaders' batch size, split"
    return size, "the prepared loaders' batch size"


def _samples(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if size is None else size


def _of_model(unit: Unit) -> Values:
    """Buckets by the width of the model, as transformers' models tell it."""
    config = getattr(unit.models[0], "config", None)
    config = getattr(config, "text_config", config)
    sizes = getattr(config, "hidden_sizes", None) or [getattr(config, "hidden_size", None)]
    if not isinstance(sizes[0], int):
        return {}
    width, origin = max(sizes), "the model's hidden size"
    return {
        "zero_optimization.reduce_bucket_size": (width * width, origin),
        "zero_optimization.stage3_prefetch_bucket_size": (int(0.9 * width * width), origin),
        "zero_optimization.stage3_param_persistence_threshold": (10 * width, origin),
    }


def _of_placeholders(unit: Unit) -> Values:
    values: Values = {}
    for optimizer in unit.optimizers:
        if isinstance(optimizer, DummyOptim):
            given = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay} | optimizer.kwargs
            values |= {f"optimizer.params.{key}": (value, "DummyOptim") for key, value in given.items()}
    for scheduler in unit.schedulers:
        if isinstance(scheduler, DummyScheduler):
            given = dict(_schedule(scheduler)) | scheduler.kwargs
            values |= {f"scheduler.params.{key}": (value, "DummyScheduler") for key, value in given.items()}
    return values


def _schedule(scheduler: DummyScheduler) -> Iterator[tuple[str, Any]]:
    optimizer = scheduler.optimizer
    yield "warmup_min_lr", 0
    yield "warmup_max_lr", getattr(optimizer, "lr", None) or optimizer.param_groups[0]["lr"]
    yield "warmup_num_steps", max(1, scheduler.warmup_num_steps)  # DeepSpeed refuses 0
    if scheduler.total_num_steps is not None:
        yield "total_num_steps", scheduler.total_num_steps


def _of_objects(asked: Mapping[str, Any], unit: Unit) -> Iterator[str]:
    """Optimizers and schedulers that the JSON and `prepare` both give, or neither."""
    parts = (("optimizer", unit.optimizers, DummyOptim), ("scheduler", unit.schedulers, DummyScheduler))
    for section, prepared, placeholder in parts:
        for each in prepared:
            stands, name = isinstance(each, placeholder), type(each).__name__
            if section in asked and not stands:
                yield f"{section} is in the JSON, and a {name} is prepared; prepare a {placeholder.__name__}"
            if section not in asked and stands and getattr(each, "lr_scheduler_callable", None) is None:
                yield f"a {name} stands for the JSON's {section}, but there is none"


def _scale(fp16: dict[str, Any], scaler: GradScalerKwargs) -> list[str]:
    """Section grad_scaler in DeepSpeed's words, for keys that its JSON leaves out."""
    given = scaler.to_kwargs()
    power = math.log2(given.pop("init_scale", 65536.0))
    if power.is_integer():
        fp16.setdefault("initial_scale_power", int(power))
        fp16.setdefault("loss_scale_window", given.pop("growth_interval", 2000))
        fp16.setdefault("hysteresis", 1)  # torch's lowers the scale at the first overflow, too
        left = sorted(given)
    else:
        left = ["init_scale (no power of 2)", *given]
    return [f"DeepSpeed's loss scaler has no grad_scaler.{name}" for name in left]


def engine_settings(made: Mapping[str, Any], unit: Unit) -> dict[str, Any]:
    """Return the settings an engine is built with.

    Core counts micro-batches and says when to clip.

    What the engine is told is so: windows of one, no clipping, a step wherever `step` is called.
    """
    # To the engine a part of a sequence is as good as a batch.
    told = {key: made[key] for key in made if key not in ("sequence_parallel_size", "data_parallel_size")}
    told |= {
        "gradient_accumulation_steps": 1,
        "train_batch_size": made["train_micro_batch_size_per_gpu"] * unit.run.world.size,
        "gradient_clipping": 0.0,
    }
    told.setdefault("steps_per_print", None)
    if not unit.optimizers:
        told.pop("scheduler", None)
        if settings.get(made, "zero_optimization.stage", 0) < 3:
            # Stages 1 and 2 shard optimizer state and gradients: there are none.
            told["zero_optimization"] = {"stage": 0}
    elif not isinstance(unit.optimizers[-1], DummyOptim):
        told.setdefault("zero_allow_untested_optimizer", True)
        told.setdefault("zero_force_ds_cpu_optimizer", False)
    check(told, unit.name)
    return told
