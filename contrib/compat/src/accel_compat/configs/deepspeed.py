"""DeepSpeedPlugin: fields that variables fill, around one DeepSpeed config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from accel_compat.configs.deepspeed_json import HfDeepSpeedConfig
from accel_compat.configs.translation import Translated
from accel_compat.environment.variables import str_to_bool
from accel_compat.notices import warn_once
from accel_compat.settings import fill_from_variables

PATHS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Field -> its place in DeepSpeed's JSON."""
_FILLED = (*PATHS, "hf_ds_config", "transformer_moe_cls_names")
"""Fields that variables fill."""


@dataclass
class DeepSpeedPlugin(Translated):
    """Options of DeepSpeed. ACCELERATE_DEEPSPEED_ variables fill what is not given."""

    ours: ClassVar[str] = "accel_deepspeed:DeepSpeedPlugin"

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None
    deepspeed_config: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        fill_from_variables(self, "deepspeed", *_FILLED)
        if self.enable_msamp is None:
            self.enable_msamp = os.environ.get("ACCELERATE_FP8_BACKEND") == "MSAMP"
        if self.hf_ds_config in (None, "none"):
            self.hf_ds_config = HfDeepSpeedConfig(self._made())
        else:
            self._adopt()
        self.deepspeed_config = self.hf_ds_config.config
        self.deepspeed_config["steps_per_print"] = float("inf")  # else DeepSpeed prints each step
        if self.zero3_init_flag is None:
            asked = os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", str(self.hf_ds_config.is_zero3()))
            self.zero3_init_flag = str_to_bool(asked) == 1
        if self.zero3_init_flag and not self.hf_ds_config.is_zero3():
            warn_once("zero3_init_flag is for ZeRO stage 3 only; it is off")
            self.zero3_init_flag = False
        self._selected = False

    def _made(self) -> dict[str, Any]:
        """Return the config that the fields alone describe."""
        zero: dict[str, Any] = {"stage": self.zero_stage}
        for name in ("offload_optimizer", "offload_param"):
            device = getattr(self, f"{name}_device")
            path = getattr(self, f"{name}_nvme_path")
            zero[name] = {"device": device, "nvme_path": path if device == "nvme" else None}
        zero["stage3_gather_16bit_weights_on_model_save"] = self.zero3_save_16bit_model
        made = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": zero,
        }
        return {**made, "gradient_clipping": self.gradient_clipping} if self.gradient_clipping else made

    def _adopt(self) -> None:
        """Set the fields from the config that was given; fill its autos from the fields."""
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        config = self.hf_ds_config.config
        config.setdefault("gradient_accumulation_steps", 1)
        if "zero_optimization" not in config:
            raise ValueError("Please specify the ZeRO optimization config in the DeepSpeed config.")
        given = {path: getattr(self, name) for name, path in PATHS.items() if getattr(self, name) is not None}
        for path in given:
            self.fill_match(path, must_match=False, **given)
        self.hf_ds_config.set_stage_and_offload()
        for name, path in PATHS.items():
            found = self.hf_ds_config.get_value(path)
            if found not in (None, "auto"):
                setattr(self, name, found)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill a key that says auto; else note if its value differs from the argument."""
        mismatches = [] if mismatches is None else mismatches
        config, key = self.hf_ds_config.find_config_node(ds_key_long)
        if config is None:
            return
        if config.get(key) == "auto":
            if ds_key_long not in kwargs:
                raise ValueError(
                    f"`{ds_key_long}` not found in kwargs. Please specify `{ds_key_long}` without"
                    " `auto` (set to"
                    " correct value) in the DeepSpeed config file or pass it in kwargs."
                )
            config[key] = kwargs[ds_key_long]
        elif (
            must_match and config.get(key) is not None and config[key] != kwargs.get(ds_key_long, config[key])
        ):
            mismatches.append(f"- ds {ds_key_long}={config[key]} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Tell whether a key says auto."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every "auto", and refuse values that differ from the arguments."""
        mismatches = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", mismatches, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, mismatches, must_match, **kwargs)
        if mismatches and prefix == "":
            listed = "\n".join(mismatches)
            raise ValueError(
                "Please correct the following DeepSpeed config values that mismatch kwargs "
                f" values:\n{listed}\nThe easiest method is to set these DeepSpeed config values to 'auto'."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Say the run's precision in the config, where it says nothing else."""
        config = self.deepspeed_config
        other = {"fp16": "bf16", "bf16": "fp16"}.get(mixed_precision)
        if other and str(config.get(other, {}).get("enabled", False)).lower() == "true":
            raise ValueError(
                f"`--mixed_precision` arg cannot be set to `{mixed_precision}` when `{other}` is set"
                " in the DeepSpeed"
                " config file."
            )
        for name in ("fp16", "bf16"):
            section = config.setdefault(name, {"enabled": name == mixed_precision})
            if section.get("enabled") == "auto":
                section["enabled"] = name == mixed_precision

    def set_deepspeed_weakref(self) -> None:
        """Give transformers the config.

        Its `from_pretrained` shards under ZeRO 3 from now on.

        Raises:
            ImportError: transformers is not installed.
        """
        config = deepcopy(self.deepspeed_config)
        for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
            if config.get(key, "auto") == "auto":
                config[key] = 1
        if config.get("train_batch_size") == "auto":
            del config["train_batch_size"]
        theirs: Any = import_module("transformers.integrations.deepspeed")
        self.dschf = HfDeepSpeedConfig(config)  # they keep a weak reference
        theirs.set_hf_deepspeed_config(self.dschf)

    def is_zero3_init_enabled(self) -> bool | None:
        """Tell whether models are sharded while they are built."""
        return self.zero3_init_flag

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """With that set otherwise inside, as training scripts of diffusers build models that stay whole."""
        before, self.zero3_init_flag = self.zero3_init_flag, enable
        try:
            yield
        finally:
            self.zero3_init_flag = before

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Mark it as selected; only AcceleratorState.select_deepspeed_plugin calls it."""
        if not _from_accelerator_state:
            raise ValueError(
                "A `DeepSpeedPlugin` object must be enabled manually by calling"
                " `AcceleratorState().enable_deepspeed_plugin(plugin_key)`."
            )
        self._selected = True

    def _unselect(self) -> None:
        self._selected = False

    @property
    def selected(self) -> bool:
        """True if models are prepared with it."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(  # Accelerate's type
            "'enabled' can only be set through calling 'AcceleratorState().enable_deepspeed_plugin(key)'."
        )

    def translation(self) -> dict[str, Any]:
        """Return the config as a whole, and what is not in it."""
        config = {key: value for key, value in self.deepspeed_config.items() if key != "steps_per_print"}
        found: dict[str, Any] = {"hf_ds_config": _without_none(config)}
        if self.gradient_clipping != 0:
            found["clip_unasked"] = 1.0  # by default, of Accelerate ("auto") as of DeepSpeed
        if self.gradient_clipping == "auto" and config.get("gradient_clipping") == 1.0:
            del found["hf_ds_config"]["gradient_clipping"]  # `prepare` has filled it in
        if self.zero3_init_flag:
            found["zero3_init_flag"] = True
        for name, default in (("is_train_batch_min", True), ("transformer_moe_cls_names", None)):
            if getattr(self, name) != default:
                found[name] = getattr(self, name)
        if self.enable_msamp:
            found["enable_msamp"] = True
        return found


def _without_none(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    found = {key: _without_none(value) for key, value in config.items() if value is not None}
    return {key: value for key, value in found.items() if value != {"device": "none"}}
