"""The options of a quantised model, by Accelerate's names."""

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


def _is(kind: type | tuple[type, ...], wanted: str) -> Any:
    def check(config: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"{attribute.name} is {value!r}\ngive {wanted}")

    return check


def _names(config: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and (isinstance(value, str) or not all(isinstance(each, str) for each in value)):
        raise ConfigError(f"{attribute.name} is {value!r}\ngive a list of names of modules, or None")


def _one_of(*choices: Any) -> Any:
    def check(config: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name} is {value!r}\ngive one of {', '.join(map(str, choices))}")

    return check


_IS_BOOL: Final = _is(bool, "True or False")


@frozen(kw_only=True)
class BnbQuantizationConfig:
    """Options of quantisation by bitsandbytes, with Accelerate's names and defaults.

    load_in_8bit, load_in_4bit: exactly one of them.
    llm_int8_threshold: columns of activations with larger values are computed in float16; 8 bits only.
    bnb_4bit_quant_type: "fp4" or "nf4".
    bnb_4bit_use_double_quant: quantise the scales of 4-bit weights too.
    bnb_4bit_compute_dtype: dtype in which 4-bit layers multiply; also "fp32", "fp16", "bf16".
    bnb_4bit_quant_storage: dtype of the tensor whose bytes are the 4-bit weights.
    torch_dtype: dtype of all other parameters. None: float16 with 8 bits, the compute dtype with 4.
    skip_modules: names of modules to leave, whole or a part between dots. None: see `choose`.
    keep_in_fp32_modules: names of modules to leave, in float32.

    Raises:
        ConfigError: a value that is not possible.
    """

    load_in_8bit: bool = field(default=False, validator=_IS_BOOL)
    llm_int8_threshold: float = field(default=6.0, validator=_is((int, float), "a number"))
    load_in_4bit: bool = field(default=False, validator=_IS_BOOL)
    bnb_4bit_quant_type: str = field(default="fp4", validator=_one_of("fp4", "nf4"))
    bnb_4bit_use_double_quant: bool = field(default=False, validator=_IS_BOOL)
    bnb_4bit_compute_dtype: Any = field(default="fp16", converter=_dtype)
    bnb_4bit_quant_storage: torch.dtype = field(default=torch.uint8, validator=_one_of(*_STORAGES))
    torch_dtype: Any = field(default=None, converter=_dtype)
    skip_modules: Sequence[str] | None = field(default=None, validator=_names)
    keep_in_fp32_modules: Sequence[str] | None = field(default=None, validator=_names)

    def __attrs_post_init__(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigError(
                f"load_in_8bit and load_in_4bit are both {self.load_in_4bit}\nset exactly one of them"
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            raise ConfigError(
                f"llm_int8_threshold={self.llm_int8_threshold} means nothing with load_in_4bit\nleave it out"
            )
        if self.torch_dtype is None:
            usual = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
            object.__setattr__(self, "torch_dtype", usual)
        require_dtype(self)


def require_dtype(config: Any) -> None:
    """Raise unless bitsandbytes quantises and multiplies in the dtypes of a config.

    Raises:
        ConfigError: names the option.
    """
    for name in ("bnb_4bit_compute_dtype", "torch_dtype"):  # the second may have come from the first
        if (value := getattr(config, name)) not in _DTYPES.values():
            raise ConfigError(f"{name} is {value!r}\ngive one of {', '.join(map(str, _DTYPES.values()))}")
