"""Optimizer of megatron-core, with the user's groups and hyperparameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch

from accel_core import AccelError, ConfigError, optimizer_like, step_granularity, step_with_hooks
from accel_megatron import settings
from accel_megatron.library import quiet
from accel_megatron.stepped import Stepped

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_core import Run, Unit
    from accel_megatron.building import Chunks
    from accel_megatron.config import Sized

__all__ = ["Stepper", "why_unsupported"]

_KINDS: Final = {torch.optim.AdamW: "adam", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
_HOW: Final = ("foreach", "fused", "capturable", "differentiable")
"""Hyperparameters that choose an implementation, with the same result."""
_GROUP: Final = "accel_group"
_REDUCED: Final = (
    "megatron: the last clip, unscale or step has reduced the gradients; they are not cleared since, and"
    " megatron-core cannot reduce them twice\n"
    "compute them by accelerator.backward, clip or unscale just before optimizer.step(), and call zero_grad()"
    " of the prepared optimizer or model after each step"
)
_LOADED: Final = (
    "megatron: optimizer.load_state_dict after prepare fills an optimizer that does not step; megatron-core's"
    " does\n"
    "load its state by accelerator.load_state"
)


def why_unsupported(optimizer: Optimizer, plugin: Sized, device: torch.device) -> str | None:
    """Return why megatron-core cannot step with the optimizer; None if it can."""
    name = type(optimizer).__name__
    if step_granularity(optimizer, device) != "element":
        return (
            f"{name} needs whole weights, or fails on small tensors, and megatron-core splits weights and"
            " joins some of them into one tensor\n"
            "use an optimizer that steps each element by itself, such as AdamW, or strategy ddp; if this"
            f" {name} does, set its attribute: optimizer.elementwise = True"
        )
    if plugin.use_distributed_optimizer and not (
        type(optimizer) is torch.optim.AdamW and _has_own(optimizer)
    ):
        return (
            f"megatron-core's distributed optimizer is AdamW without amsgrad and maximize, and a {name} is"
            " prepared\n"
            "prepare torch.optim.AdamW, or leave use_distributed_optimizer out"
        )
    if plugin.other_megatron_args.get("optimizer_cpu_offload") and not _has_own(optimizer):
        return (
            f"megatron-core offloads AdamW, Adam and SGD, and a {name} is prepared\n"
            "prepare torch.optim.AdamW, or leave optimizer_cpu_offload out"
        )
    return None


def _has_own(optimizer: Optimizer) -> bool:
    """Return whether megatron-core has an optimizer that computes the same, and faster."""
    unlike = any(group.get("amsgrad") or group.get("maximize") for group in optimizer.param_groups)
    return type(optimizer) in _KINDS and not unlike


class Stepper:
    """Steps `user_optimizer`, which the user holds, by an optimizer of megatron-core.

    The groups of the user's optimizer count at each step.
    """

    def __init__(self, run: Run, unit: Unit, plugin: Sized, chunks: Chunks) -> None:
        (self.user_optimizer,) = unit.optimizers
        self.chunks, self.clipping = chunks, plugin.gradient_clipping
        self.ready: bool | None = None
        """True if gradients are finite, once they are reduced for a step; None until then."""
        self.clipped = False
        """True if the gradients were clipped already."""
        groups = _groups_of(unit, self.user_optimizer, chunks)
        stepped = {each for group in self.user_optimizer.param_groups for each in group["params"]}
        left_out = [p for p in unit.named_parameters().values() if p.requires_grad and p not in stepped]
        unit.detach.append(partial(_unfreeze, left_out))  # in no group, so they are not trained here
        for parameter in chunks.parameters():
            parameter.requires_grad_(parameter in groups)
        self.make(run, plugin, groups)
        unit.detach.append(self.user_optimizer.register_load_state_dict_pre_hook(_refuse_load).remove)
        if not chunks.scheduled:  # the user's parameters, of which 16-bit ones have masters
            (model,) = unit.models
            _STEPPERS[model] = weakref.ref(self)
            unit.detach.append(model.register_load_state_dict_post_hook(_step_from_loaded).remove)

    def make(self, run: Run, plugin: Sized, groups: Mapping[nn.Parameter, int]) -> None:
        """Wrap the chunks, and make the optimizer of them. Collective."""
        from accel_megatron.building import wrap

        wrap(self.chunks, plugin)
        with quiet():
            from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
            from megatron.core.optimizer.optimizer_config import ParamPredicate

            kind, first = type(self.user_optimizer), _hyperparameters(self.user_optimizer.param_groups[0])
            config = OptimizerConfig(
                optimizer=_KINDS.get(kind, "sgd"),
                decoupled_weight_decay=kind is torch.optim.AdamW,
                lr=first.get("lr"),
                weight_decay=first.get("weight_decay", 0.0),
                **settings.optimizer_settings(run, plugin),
            )
            # One group per group of the user's, so that each step can follow its rates.
            overrides = {
                ParamKey(predicate=ParamPredicate(f"group{number}", _of_group(groups, number))): {
                    _GROUP: number,
                    "wd_mult": 0.0 if group.get("weight_decay", 0) == 0 else 1.0,
                    "lr_mult": float(group["lr"]) / first["lr"] if first.get("lr") else 1.0,
                    **_hyperparameters(group),
                }
                for number, group in enumerate(self.user_optimizer.param_groups)
            }
            self.inner = get_megatron_optimizer(config, self.chunks.run, overrides)
        if not _has_own(self.user_optimizer):
            for each in self.inner_optimizers():
                own = [
                    {**group, **self.user_optimizer.param_groups[group[_GROUP]], "params": group["params"]}
                    for group in each.optimizer.param_groups
                ]
                each.optimizer = optimizer_like(self.user_optimizer, own)
        if plugin.other_megatron_args.get("loss_scale") or config.fp16:
            self.chunks.config.grad_scale_func = self.inner.scale_loss

    def follow(self) -> None:
        """Copy the hyperparameters of the user's groups to megatron-core's groups."""
        for group in self.inner.param_groups:
            group.update(_hyperparameters(self.user_optimizer.param_groups[group[_GROUP]]))

    def lead(self) -> None:
        """Copy learning rates and weight decays of megatron-core's groups to the user's."""
        for group in self.inner.param_groups:
            mine = self.user_optimizer.param_groups[group[_GROUP]]
            mine |= {key: group[key] for key in ("lr", "weight_decay") if key in group}

    def prepare(self) -> bool:
        """Unscale gradients, once a window; whether they are finite. Collective."""
        if self.ready is None:
            self.ready = not self.inner.prepare_grads()
        return self.ready

    def reduce(self) -> None:
        """Average gradients over the ranks that have these weights. Collective.

        A rank without a backward adds zeros, which megatron-core refuses if it reduces during backward.
        """
        from megatron.core.distributed import finalize_model_grads

        if self.ready is not None:
            raise AccelError(_REDUCED)
        finalize_model_grads(self.chunks.run)

    def step(self) -> bool:
        """Step; return False if scaled gradients were not finite. Collective."""
        finite = self.prepare()
        if finite:
            if self.clipping and not self.clipped:
                self.clip(self.clipping)
            step_with_hooks(self.user_optimizer, self._compute)
        return finite

    def _compute(self) -> None:
        self.follow()
        self.inner.step_with_ready_grads()
        if not _has_own(self.user_optimizer):  # some rules count steps in the groups
            for group in self.inner.param_groups:
                mine = self.user_optimizer.param_groups[group[_GROUP]]
                mine |= {key: group[key] for key in mine if key != "params"}

    def clip(self, max_norm: float) -> float:
        """Clip the gradients to this norm; return the norm before. Collective.

        inf: clip no more than was asked for before.
        """
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        is_finite, norm = self.prepare(), float(self.inner.get_grad_norm() or 0.0)
        if is_finite and max_norm != float("inf"):
            for inner_optimizer in self.inner_optimizers():
                if parameters := inner_optimizer.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, max_norm, norm)
            self.clipped = True
        return norm

    def clamp(self, value: float) -> None:
        """Each gradient to [-value, value]."""
        self.prepare()
        for inner_optimizer in self.inner_optimizers():
            for gradient in (p.grad for p in inner_optimizer.get_parameters()):
                if gradient is not None:
                    gradient.clamp_(-value, value)

    def drop(self) -> None:
        """Zero all gradients."""
        for group in self.chunks.bucket_groups():
            if group.grad_reduce_handle is not None:  # they are dropped while they are being reduced
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
        for chunk in self.chunks.run:
            chunk.zero_grad_buffer()
        self.chunks.reduce_at_the_step()
        self.inner.zero_grad()
        self.ready, self.clipped = None, False

    def inner_optimizers(self) -> Sequence[Any]:
        """megatron-core's optimizers: one for experts, and one for the rest."""
        found: Sequence[Any] = [
            optimizer
            for optimizer in self.inner.chained_optimizers
            if not getattr(optimizer, "is_stub_optimizer", False)
        ]
        return found

    def stepped(self) -> Iterator[Stepped]:
        """Yield the tensors that this rank steps."""
        for inner_optimizer in self.inner_optimizers():
            groups = {
                id(key): group for group in inner_optimizer.optimizer.param_groups for key in group["params"]
            }
            is_torchs = type(inner_optimizer.optimizer).__module__.startswith("torch.optim")
            by_group = _has_own(self.user_optimizer) and not is_torchs
            for parameter, key in _pairs(inner_optimizer):
                begin = 0
                if hasattr(inner_optimizer, "gbuf_ranges"):
                    begin = inner_optimizer._get_model_param_range_map(parameter)["param"].start
                yield Stepped(
                    parameter,
                    key,
                    begin,
                    inner_optimizer.optimizer,
                    groups[id(key)],
                    counts_by_group=by_group,
                )

    def refresh(self) -> None:
        """Make forward's weights from the stepped tensors. Collective."""
        for inner_optimizer in self.inner_optimizers():
            if hasattr(inner_optimizer, "_copy_main_params_to_model_params"):
                inner_optimizer._copy_main_params_to_model_params()
        how = self.chunks.run[0].ddp_config
        # Where a forward of a part of the model has left some on their way, the first only waits for them.
        for _ in range(how.use_distributed_optimizer + how.overlap_param_gather):
            for chunk in self.chunks.run:
                chunk.start_param_sync(force_sync=True)


def _pairs(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter of a chunk, tensor stepped for it) of a megatron-core optimizer."""
    ours: tuple[Any, ...]
    theirs: tuple[Any, ...]
    # The distributed optimizer: each rank steps ranges of parameters, from float32 masters.
    if hasattr(optimizer, "gbuf_ranges"):
        ours = (optimizer.model_fp32_groups, optimizer.model_float16_groups)
        theirs = (optimizer.shard_fp32_groups, optimizer.shard_fp32_from_float16_groups)
    # 16-bit weights with float32 masters; else float32 weights, stepped as they are.
    elif hasattr(optimizer, "float16_groups"):
        ours = (optimizer.float16_groups, optimizer.fp32_from_fp32_groups)
        theirs = (optimizer.fp32_from_float16_groups, optimizer.fp32_from_fp32_groups)
    else:
        ours = theirs = ([group["params"] for group in optimizer.param_groups],)
    for mine, stepped in zip(ours, theirs, strict=True):
        for parameters, keys in zip(mine, stepped, strict=True):
            yield from zip(parameters, keys, strict=True)


def _of_group(groups: Mapping[nn.Parameter, int], number: int) -> Any:
    return lambda parameter: groups.get(parameter) == number


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in ("params", "param_names", *_HOW)}
    kept = {
        key: value for key, value in kept.items() if value is not None and key not in ("amsgrad", "maximize")
    }
    return {
        key: value.item() if isinstance(value, torch.Tensor) else _hashable(value)
        for key, value in kept.items()
    }


def _unfreeze(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_()


def _refuse_load(*_: Any) -> None:
    raise AccelError(_LOADED)


def _step_from_loaded(model: nn.Module, _: Any) -> None:
    stepper = _STEPPERS[model]() if model in _STEPPERS else None  # a copy has none
    if stepper is not None:
        stepper.inner.reload_model_params()


_STEPPERS: Final[WeakKeyDictionary[nn.Module, weakref.ref[Stepper]]] = WeakKeyDictionary()
"""Model that runs whole -> its stepper. Not in the model, which may be copied."""


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _groups_of(unit: Unit, optimizer: Optimizer, chunks: Chunks) -> dict[nn.Parameter, int]:
    """Parameter of a chunk -> number of its group.

    Those that no group has are not trained.
    """
    names = {parameter: name for name, parameter in unit.named_parameters().items()}
    numbers = {
        names[parameter]: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad
    }
    found: dict[nn.Parameter, int] = {}
    for parameter, pieces in chunks.shard_map.items():
        # A fused layer has several of the user's weights in one tensor.
        mine = {piece.name: numbers.get(unit.aliases.get(piece.name, piece.name)) for piece in pieces}
        if len(set(mine.values())) > 1:
            (one, first), *others = mine.items()
            other, second = next(pair for pair in others if pair[1] != first)
            raise ConfigError(
                f"{one} and {other} are one tensor in megatron-core, but the optimizer has them in groups"
                f" {first} and {second}\ngive them one group, or none"
            )
        if (number := next(iter(mine.values()), None)) is not None:
            found[parameter] = number
    return found
