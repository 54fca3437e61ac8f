"""FullyShardedDataParallelPlugin: fields that variables fill, and torch's enums."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accel_compat.configs.translation import Translated
from accel_compat.environment.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accel_compat.environment.variables import parse_flag_from_env, str_to_bool
from accel_compat.settings import fill_from_variables

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        OffloadPolicy,
        ShardingStrategy,
        StateDictType,
    )

_FLAGS = ("activation_checkpointing", "activation_checkpointing_offload", "cpu_ram_efficient_loading")
_FLAGS_OF_VERSION_1 = ("use_orig_params", "sync_module_states", "forward_prefetch")
_DTYPES = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def _torchs(name: str) -> Any:
    """Import a name of torch.distributed.fsdp late, as the import takes a second."""
    return getattr(import_module("torch.distributed.fsdp"), name)


def _policies() -> Any:
    return import_module("torch.distributed.fsdp.wrap")


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class called `name` of the module or of one inside it."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def _member(kind: type[Enum], words: list[str], value: Any, what: str) -> Any:
    """Return a member of torch's enum by name in any case, or number from 1."""
    if isinstance(value, kind):
        return value
    word = str(value).upper()
    if word.isdigit() and 0 < int(word) <= len(words):
        word = words[int(word) - 1]
    if word not in words:
        raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(words)}")
    return kind[f"_{word}" if word == "HYBRID_SHARD_ZERO2" else word]


def _strategy(asked: Any) -> Any:
    return _member(_torchs("ShardingStrategy"), FSDP_SHARDING_STRATEGY, asked, "sharding_strategy")


@dataclass
class FullyShardedDataParallelPlugin(Translated):
    """Options of FSDP. FSDP_ variables fill what is not given."""

    ours: ClassVar[str] = "accel_fsdp:FullyShardedDataParallelPlugin"

    fsdp_version: int = None  # type: ignore[assignment]  # as the next: filled by __post_init__
    sharding_strategy: str | ShardingStrategy | None = None
    reshard_after_forward: str | ShardingStrategy | bool | None = None
    backward_prefetch: str | BackwardPrefetch | None = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: bool | CPUOffload | OffloadPolicy | None = None
    ignored_modules: Iterable[nn.Module] | str | None = None
    state_dict_type: str | StateDictType | None = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self._filled: dict[str, Any] = {}  # what nobody gave: ours have their own
        fill_from_variables(self, "fsdp", "fsdp_version", "cpu_offload", "ignored_modules", *_FLAGS)
        if self.fsdp_version not in (1, 2):
            raise ValueError(f"fsdp_version is {self.fsdp_version!r}\nset it to the number 1 or 2")
        if self.fsdp_version == 1:
            fill_from_variables(self, "fsdp", *_FLAGS_OF_VERSION_1)
        self._set_sharding()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        self._set_prefetch()
        self.set_state_dict_type()
        self._set_wrapping()
        self._set_flags()
        if isinstance(self.mixed_precision_policy, (str, dict)):
            self.set_mixed_precision(
                self.mixed_precision_policy, override=isinstance(self.mixed_precision_policy, str)
            )

    def _set_sharding(self) -> None:
        """Set the sharding strategy in version 1, `reshard_after_forward` in version 2."""
        again = self.reshard_after_forward
        if self.sharding_strategy is not None:
            self.sharding_strategy = _strategy(self.sharding_strategy)
        if self.fsdp_version == 1:
            if isinstance(again, bool):
                raise ValueError(
                    f"reshard_after_forward={again} is for fsdp_version=2; version 1 takes a sharding"
                    " strategy"
                )
            asked = self.sharding_strategy or again or os.environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
            self.sharding_strategy = _strategy(asked)
            return
        if again is None and self.sharding_strategy is None:
            again = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true")
        if isinstance(again, str):
            again = bool(str_to_bool(again))
        if not isinstance(again, bool) and self.sharding_strategy is None:
            raise ValueError(f"reshard_after_forward={again}: with fsdp_version=2 it must be a bool")
        self.reshard_after_forward = again

    def _set_prefetch(self) -> None:
        asked = self.backward_prefetch or os.environ.get("FSDP_BACKWARD_PREFETCH")
        if isinstance(asked, str) and asked.upper() == "NO_PREFETCH":
            asked = None
        if asked is not None:
            asked = _member(_torchs("BackwardPrefetch"), FSDP_BACKWARD_PREFETCH, asked, "backward_prefetch")
        if self.fsdp_version == 2:
            asked = None  # there is nothing to choose: its blocks always prefetch
            if self.forward_prefetch is not None:
                raise ValueError("forward_prefetch is for fsdp_version=1; leave it unset")
        self.backward_prefetch = asked

    def _set_wrapping(self) -> None:
        policy = self.auto_wrap_policy or os.environ.get("FSDP_AUTO_WRAP_POLICY")
        self._wrote_policy = policy is not None
        policy = policy or "NO_WRAP"
        if not isinstance(policy, str):
            return
        if policy.upper() not in FSDP_AUTO_WRAP_POLICY:
            raise ValueError(
                f"Invalid auto wrap policy: {policy}. Must be one of {', '.join(FSDP_AUTO_WRAP_POLICY)}"
            )
        self.auto_wrap_policy = None
        if policy.upper() == "TRANSFORMER_BASED_WRAP":
            self.auto_wrap_policy = _policies().transformer_auto_wrap_policy
            names: Any = self.transformer_cls_names_to_wrap or os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
            self.transformer_cls_names_to_wrap = names.split(",") if isinstance(names, str) else names
        elif policy.upper() == "SIZE_BASED_WRAP":
            self.auto_wrap_policy = _policies().size_based_auto_wrap_policy
            if self.min_num_params is None:
                self.min_num_params = int(os.environ.get("FSDP_MIN_NUM_PARAMS", "0"))

    def _set_flags(self) -> None:
        if self.fsdp_version == 2:
            self.use_orig_params = self.sync_module_states = None
        elif self.cpu_ram_efficient_loading:
            self.sync_module_states = True
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ValueError("activation_checkpointing_offload=True requires activation_checkpointing=True")
        if bool(self.cpu_ram_efficient_loading) != parse_flag_from_env(_EFFICIENT):  # transformers reads it
            os.environ[_EFFICIENT] = str(self.cpu_ram_efficient_loading)

    def set_cpu_offload(self) -> None:
        """Turn a bool into torch's object for this version."""
        if isinstance(self.cpu_offload, bool):
            if self.fsdp_version == 1:
                self.cpu_offload = _torchs("CPUOffload")(offload_params=self.cpu_offload)
            else:
                self.cpu_offload = _torchs("CPUOffloadPolicy" if self.cpu_offload else "OffloadPolicy")()

    def validate_cpu_offload(self) -> None:
        """Raise ValueError if the offload object is not of this version."""
        name = "CPUOffload" if self.fsdp_version == 1 else "OffloadPolicy"
        if not isinstance(self.cpu_offload, _torchs(name)):
            raise ValueError(
                f"cpu_offload must be a bool or a torch.distributed.fsdp.{name} with"
                f" fsdp_version={self.fsdp_version}, not {self.cpu_offload!r}"
            )

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Choose what `state_dict` of a prepared model gives."""
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        asked = state_dict_type or self.state_dict_type or os.environ.get("FSDP_STATE_DICT_TYPE", default)
        self.state_dict_type = _member(
            _torchs("StateDictType"), FSDP_STATE_DICT_TYPE, asked, "state_dict_type"
        )
        kinds = {"FULL_STATE_DICT": "Full", "SHARDED_STATE_DICT": "Sharded"}
        word = kinds.get(getattr(self.state_dict_type, "name", ""))
        for name, kind in (("state_dict_config", ""), ("optim_state_dict_config", "Optim")) if word else ():
            if getattr(self, name) is None or getattr(self, name) is self._filled.get(name):
                more = {"rank0_only": True} if word == "Full" else {}
                made = _torchs(f"{word}{kind}StateDictConfig")(offload_to_cpu=True, **more)
                setattr(self, name, made)
                self._filled[name] = made
        if self.fsdp_version == 2 and self.state_dict_type is _torchs("StateDictType").LOCAL_STATE_DICT:
            raise ValueError(
                "state_dict_type LOCAL_STATE_DICT is for fsdp_version=1; take SHARDED_STATE_DICT"
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Find the classes of a transformer-based policy in this model."""
        if self.auto_wrap_policy is _policies().transformer_auto_wrap_policy:
            if self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = list(getattr(model, "_no_split_modules", None) or ())
            found = {
                name: get_module_class_from_name(model, name) for name in self.transformer_cls_names_to_wrap
            }
            for name, cls in found.items():
                if cls is None:
                    raise ValueError(f"Could not find the transformer layer class {name} in the model.")
            classes = {cls for cls in found.values() if cls is not None}
            self.auto_wrap_policy = functools.partial(
                _policies().transformer_auto_wrap_policy, transformer_layer_cls=classes
            )
        elif self.auto_wrap_policy is _policies().size_based_auto_wrap_policy:
            self.auto_wrap_policy = (
                functools.partial(_policies().size_based_auto_wrap_policy, min_num_params=self.min_num_params)
                if self.min_num_params
                else None
            )

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Make torch's policy object for this version out of a name, a dtype or a dict."""
        kind = _torchs("MixedPrecision" if self.fsdp_version == 1 else "MixedPrecisionPolicy")
        third = "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"
        if isinstance(mixed_precision, dict):
            wanted = ["param_dtype", "reduce_dtype", third]
            if not mixed_precision.keys() >= {*wanted} or not {*mixed_precision.values()} <= {
                *_DTYPES.values()
            }:
                raise ValueError(
                    f"Invalid mixed precision policy: {mixed_precision}. Must be a `dict` with keys {wanted}."
                    f" Values must be one of {sorted({*map(str, _DTYPES.values())})}"
                )
            self.mixed_precision_policy = kind(**mixed_precision)
        elif override or self.mixed_precision_policy is None:
            dtype = _DTYPES.get(mixed_precision, mixed_precision)
            if dtype not in _DTYPES.values():
                raise ValueError(
                    f"Invalid mixed precision: {mixed_precision}. Must be one of {list(_DTYPES)}"
                )
            last = torch.float32 if buffer_autocast and self.fsdp_version == 1 else dtype
            self.mixed_precision_policy = kind(param_dtype=dtype, reduce_dtype=dtype, **{third: last})

    def validate_mixed_precision_policy(self) -> None:
        """Raise ValueError if the policy is of another version than this."""
        kind = _torchs("MixedPrecision" if self.fsdp_version == 1 else "MixedPrecisionPolicy")
        if not isinstance(self.mixed_precision_policy, kind):
            raise ValueError(
                f"mixed_precision_policy must be a torch.distributed.fsdp.{kind.__name__} with"
                f" fsdp_version={self.fsdp_version}, not {type(self.mixed_precision_policy).__name__}"
            )

    def translation(self) -> dict[str, Any]:
        """Policies are named again, so that ours find the model's classes themselves."""
        given = {"fsdp_version": self.fsdp_version, **super().translation()}
        policy = getattr(self.auto_wrap_policy, "func", self.auto_wrap_policy)
        if policy is _policies().transformer_auto_wrap_policy:
            given["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        elif policy is _policies().size_based_auto_wrap_policy:
            given["auto_wrap_policy"] = "SIZE_BASED_WRAP"
        elif policy is None and not given.keys() & {"transformer_cls_names_to_wrap", "min_num_params"}:
            # Accelerate's default is one group, which ours warns of unless somebody wrote it.
            given["auto_wrap_policy"] = "NO_WRAP" if self._wrote_policy else _policies().ModuleWrapPolicy(())
        if type(self.cpu_offload) is _torchs("OffloadPolicy"):
            given.pop("cpu_offload", None)  # so that a file may ask for it, as where nothing was said
        for name, made in self._filled.items():
            if getattr(self, name) is made:
                given.pop(name, None)
        return {
            name: getattr(self, name) if name == "cpu_offload" else value for name, value in given.items()
        }
