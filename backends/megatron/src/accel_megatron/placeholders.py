"""Placeholder for megatron-core's schedule of learning rate and weight decay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_core import ConfigError
from accel_megatron.library import quiet

if TYPE_CHECKING:
    from accel_core import Run
    from accel_megatron.config import Sized

__all__ = ["MegatronLMDummyScheduler", "Schedule"]


class MegatronLMDummyScheduler:
    """Stands for the schedule that the options of section `megatron` describe.

    Args:
        optimizer: the one whose rates it sets.
        total_num_steps: optimizer steps of the whole training, if no option tells its length.
        warmup_num_steps: optimizer steps of linear warmup, if no option tells them.
    """

    def __init__(self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0) -> None:
        self.optimizer = optimizer
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps


class Schedule:
    """OptimizerParamScheduler of megatron-core, over the user's optimizer's groups.

    samples: samples per step, if the options count samples; otherwise a step counts as one.
    """

    def __init__(self, stands: MegatronLMDummyScheduler, optimizer: Any, plugin: Sized, run: Run) -> None:
        self.optimizer, self.run = optimizer, run
        self._by_samples = plugin.train_samples is not None or plugin.lr_decay_samples is not None
        with quiet():
            from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        decay = _length(plugin, stands)
        warmup = _warmup(plugin, stands, decay)
        for group in optimizer.param_groups:
            group.setdefault("max_lr", float(group["lr"]))
            group.setdefault("wd_mult", 0.0 if group["weight_decay"] == 0 else 1.0)
        first = optimizer.param_groups[0]
        start, end = plugin.start_weight_decay, plugin.end_weight_decay
        plain = max(float(group["weight_decay"]) for group in optimizer.param_groups)
        self.inner = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0 if warmup else float(first["lr"]),
            max_lr=float(first["lr"]),
            min_lr=plugin.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=decay,
            lr_decay_style=plugin.lr_decay_style,
            start_wd=plain if start is None else start,
            end_wd=plain if end is None else end,
            wd_incr_steps=decay,
            wd_incr_style=plugin.weight_decay_incr_style,
        )

    def step(self) -> None:
        """One optimizer step is done."""
        self.inner.step(self._samples() if self._by_samples else 1)

    def _samples(self) -> int:
        loaders = self.run.active_loaders or self.run.prepared.loaders
        if not loaders or not loaders[-1].total_batch_size:
            raise ConfigError(
                "megatron: train_samples counts samples, and no prepared DataLoader says how many a step is\n"
                "prepare the DataLoader, or give train_iters"
            )
        return int(loaders[-1].total_batch_size) * self.run.window.size

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's position."""
        return {"num_steps": self.inner.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.inner.num_steps = 0
        self.inner.step(int(state["num_steps"]))


def _warmup(plugin: Sized, stands: MegatronLMDummyScheduler, decay: int) -> int:
    """Length of the warmup, in the unit that `decay` is counted in."""
    counts = [each for each in (plugin.lr_warmup_iters, plugin.lr_warmup_samples) if each is not None]
    warmup = counts[0] if counts else stands.warmup_num_steps
    if plugin.lr_warmup_fraction is not None:
        warmup = round(plugin.lr_warmup_fraction * decay)
    if warmup >= decay:
        raise ConfigError(
            f"megatron: the warmup of {warmup} is not shorter than the decay of {decay}\n"
            "shorten lr_warmup_iters, lr_warmup_samples or lr_warmup_fraction"
        )
    return warmup


def _length(plugin: Sized, stands: MegatronLMDummyScheduler) -> int:
    given = (
        plugin.lr_decay_iters,
        plugin.lr_decay_samples,
        plugin.train_iters,
        plugin.train_samples,
        stands.total_num_steps,
    )
    found = next((each for each in given if each is not None), None)
    if found is None:
        raise ConfigError(
            "megatron: nothing says how long the schedule is\n"
            "give train_iters or train_samples, or MegatronLMDummyScheduler(optimizer, total_num_steps=...)"
        )
    return found
