"""BnbQuantizationConfig: it is made and checked as in Accelerate; the function that takes it is refused."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch

from accel_compat.translating import Spelled

from ._enums import CustomDtype

_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_KINDS: Final = {
    "load_in_8bit": (bool, "a boolean"),
    "load_in_4bit": (bool, "a boolean"),
    "llm_int8_threshold": ((int, float), "a float or an int"),
    "bnb_4bit_quant_type": (str, "a string"),
    "bnb_4bit_use_double_quant": (bool, "a boolean"),
    "skip_modules": ((list, type(None)), "a list of strings"),
    "keep_in_fp32_modules": ((list, type(None)), "a list of strings"),
}


def _dtype(value: Any, name: str) -> torch.dtype:
    found = _DTYPES.get(value, value)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} must be a torch.dtype or in ['fp32','fp16','bf16'] but found {value}")
    return found


@dataclass
class BnbQuantizationConfig(Spelled):
    """How bitsandbytes would store a model's weights."""

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name, (kind, wanted) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):  # type: ignore[arg-type]
                raise ValueError(f"{name} must be {wanted}")
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError(f"load_in_4bit and load_in_8bit can't be both {self.load_in_4bit}")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(
                f"bnb_4bit_quant_type must be in ['fp4','nf4'] but found {self.bnb_4bit_quant_type}"
            )
        self.bnb_4bit_compute_dtype = _dtype(self.bnb_4bit_compute_dtype, "bnb_4bit_compute_dtype")
        usual = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _dtype(self.torch_dtype or usual, "torch_dtype")
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warnings.warn("llm_int8_threshold can only be used for model loaded in 8bit", stacklevel=3)
