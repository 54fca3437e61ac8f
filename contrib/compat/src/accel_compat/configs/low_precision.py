"""BnbQuantizationConfig and recipes for fp8.

Those of MS-AMP are refused where they are used.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from accel_compat.configs.enums import CustomDtype
from accel_compat.configs.handlers import KwargsHandler
from accel_compat.configs.translation import Spelled, field_names
from accel_compat.environment.variables import parse_flag_from_env
from accel_compat.packages import load
from accel_compat.settings import FP8_PRODUCTS, settings
from accel_compat.unsupported import NotServedError

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
    """Options of bitsandbytes."""

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


_NO_MSAMP: Final = (
    "{}: MS-AMP is no longer maintained, and no release of it can be installed\n"
    'take AORecipeKwargs, which torchao serves, or mixed_precision="bf16"'
)


@dataclass
class AORecipeKwargs(KwargsHandler):
    """fp8 by torchao."""

    config: Any = None
    module_filter_func: Callable[..., Any] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            if self.config is None and getattr(self, name) is None:
                setattr(self, name, parse_flag_from_env(f"ACCELERATE_FP8_{name.upper()}", default=True))

    def under(self, *, fsdp2: bool) -> Any:
        """Return the options of accel-torchao that say the same.

        fsdp2: the strategy is FSDP's version 2. Under others weights are not gathered in float8: what torchao
        makes of them for that would not train.
        """
        ours = load("accel_torchao:Float8Config", type(self).__name__)
        # A filter of the user's stands in for Accelerate's own rules on ends and shapes.
        chosen: dict[str, Any] = (
            {} if self.module_filter_func is None else {"first_and_last": True, "multiple_of": 1}
        )
        chosen["filter"] = self.module_filter_func
        if self.config is None:
            gathers = fsdp2 and bool(self.enable_fsdp_float8_all_gather)
            return ours(pad_inner_dim=bool(self.pad_inner_dim), all_gather=gathers, **chosen)
        config = self.config if fsdp2 else replace(self.config, enable_fsdp_float8_all_gather=False)
        return ours(config=config, **chosen)

    def to_ours(self) -> object:
        """Return them for a strategy that is not FSDP's version 2."""
        return self.under(fsdp2=False)


@dataclass
class TERecipeKwargs(KwargsHandler):
    """fp8 by Transformer Engine.

    What is left unset has the value that Accelerate documents, or that of its variable.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] | None = None
    amax_history_len: int | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def to_ours(self) -> object:
        """Return the options of accel-transformer-engine that say the same.

        Raises:
            ValueError: an argument has no meaning in Transformer Engine any more.
        """
        ours = load("accel_transformer_engine:TransformerEngineConfig", type(self).__name__)
        said = {name: self._said(name) for name in field_names(TERecipeKwargs)}
        precisions = tuple(bool(each) for each in said["override_linear_precision"])
        if int(said["interval"]) != 1:
            raise ValueError(
                f"interval={said['interval']}: Transformer Engine computes scales in every step\nleave it out"
            )
        if precisions not in ((False, False, False), (False, True, True)):
            raise ValueError(
                f"override_linear_precision={precisions}: Transformer Engine computes both products of the"
                " backward in high precision, or none\ngive (False, True, True), or leave it out"
            )
        options: dict[str, Any] = {
            "format": said["fp8_format"],
            "in_evaluation": said["use_autocast_during_eval"],
            "high_precision_backward": precisions[1],
        }
        if not said["use_mxfp8_block_scaling"]:
            delayed = {name: int(said[name]) for name in ("margin", "amax_history_len")}
            return ours(recipe="delayed", amax_compute_algo=said["amax_compute_algo"], **delayed, **options)
        if odd := [name for name in _OF_DELAYED if getattr(self, name) is not None]:
            raise ValueError(f"{odd[0]}: MXFP8 block scaling has no history of maxima\nleave it out")
        return ours(recipe="mxfp8", **options)

    def _said(self, name: str) -> Any:
        """Return an argument, else its variable, else Accelerate's documented default."""
        if (value := getattr(self, name)) is not None:
            return value
        if name == "override_linear_precision":
            return [parse_flag_from_env(variable) for variable in FP8_PRODUCTS]
        if name.startswith("use_"):
            return parse_flag_from_env(f"ACCELERATE_FP8_{name.upper()}")
        row = settings()[f"fp8_{name.removeprefix('fp8_')}"]
        return os.environ.get(row.variable, row.default)


_OF_DELAYED: Final = ("margin", "amax_history_len", "amax_compute_algo")


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """fp8 by MS-AMP, which is not served."""

    opt_level: Literal["O1", "O2"] | None = None

    def to_ours(self) -> object:
        """Raise NotServedError."""
        raise NotServedError(_NO_MSAMP.format(type(self).__name__))


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The older name for the two together."""

    backend: Literal["MSAMP", "TE"] | None = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = self.backend.upper()  # type: ignore[assignment]
            if self.backend not in ("MSAMP", "TE"):
                raise ValueError("`backend` must be 'MSAMP' or 'TE' (TransformerEngine)")

    def to_ours(self) -> object:
        """Return the options of accel-transformer-engine, unless MS-AMP is asked for."""
        by_msamp = self.backend == "MSAMP" or (self.backend is None and self.opt_level is not None)
        return MSAMPRecipeKwargs.to_ours(self) if by_msamp else TERecipeKwargs.to_ours(self)
