"""Options of a quantised model, with Accelerate's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from attrs import Attribute, field, frozen

from accel_core import ConfigError

__all__ = ["BnbQuantizationConfig", "require_dtype"]

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
_STORAGES: Final = (torch.uint8, torch.float16, torch.bfloat16, torch.float32)


def _dtype(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _instance_of(kind: type | tuple[type, ...], wanted: str) -> Any:
    def check(config: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"{attribute.name} must be {wanted}, got {value!r}\nset it to {wanted}")

    return check


def _names(config: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and (isinstance(value, str) or not all(isinstance(each, str) for each in value)):
        raise ConfigError(
            f"{attribute.name} must be a list of names of modules, or None, got {value!r}\n"
            f"write {attribute.name}=['lm_head']"
        )


def _one_of(*choices: Any) -> Any:
    def check(config: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in choices:
            words = ", ".join(map(str, choices))
            raise ConfigError(f"{attribute.name} must be one of {words}, got {value!r}\nuse one of them")

    return check


_IS_BOOL: Final = _instance_of(bool, "True or False")


@frozen(kw_only=True)
class BnbQuantizationConfig:
    """Options of quantisation by bitsandbytes, with Accelerate's names and defaults.

    Set either `load_in_8bit` or `load_in_4bit` to True.

    Raises:
        ConfigError: a value is invalid.
    """

    load_in_8bit: bool = field(default=False, validator=_IS_BOOL)
    llm_int8_threshold: float = field(default=6.0, validator=_instance_of((int, float), "a number"))
    """Columns of activations with larger values are computed in float16; 8 bits only."""
    load_in_4bit: bool = field(default=False, validator=_IS_BOOL)
    bnb_4bit_quant_type: str = field(default="fp4", validator=_one_of("fp4", "nf4"))
    bnb_4bit_use_double_quant: bool = field(default=False, validator=_IS_BOOL)
    """Quantise the scales of 4-bit weights too."""
    bnb_4bit_compute_dtype: Any = field(default="fp16", converter=_dtype)
    """Dtype in which 4-bit layers multiply; also "fp32", "fp16", "bf16"."""
    bnb_4bit_quant_storage: torch.dtype = field(default=torch.uint8, validator=_one_of(*_STORAGES))
    """Dtype of the tensor whose bytes are the 4-bit weights."""
    torch_dtype: Any = field(default=None, converter=_dtype)
    """Dtype of all other parameters. None: float16 with 8 bits, the compute dtype with 4."""
    skip_modules: Sequence[str] | None = field(default=None, validator=_names)
    """Modules that are not quantised: whole names, or parts between dots. None: see `choose`."""
    keep_in_fp32_modules: Sequence[str] | None = field(default=None, validator=_names)
    """Modules that are not quantised, and are in float32."""

    def __attrs_post_init__(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigError(
                f"load_in_8bit and load_in_4bit are both {self.load_in_4bit}\nset exactly one of them to True"
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            raise ConfigError(
                f"llm_int8_threshold={self.llm_int8_threshold} has no effect with load_in_4bit\nleave it out"
            )
        if self.torch_dtype is None:
            usual = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
            object.__setattr__(self, "torch_dtype", usual)
        require_dtype(self)


def require_dtype(config: Any) -> None:
    """Raise ConfigError unless bitsandbytes supports the dtypes of the config."""
    # In this order, because the default of torch_dtype is the compute dtype.
    for name in ("bnb_4bit_compute_dtype", "torch_dtype"):
        if (value := getattr(config, name)) not in _DTYPES.values():
            words = ", ".join(map(str, _DTYPES.values()))
            raise ConfigError(f"{name} must be one of {words}, got {value!r}\nuse one of them")
