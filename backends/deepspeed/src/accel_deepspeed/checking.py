"""Checks for settings that DeepSpeed does not know or take, before engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from accel_core import ConfigError
from accel_deepspeed.settings import get

__all__ = ["check"]

_OPS: Final = {
    "offload_optimizer.device": ("nvme", "AsyncIO"),
    "offload_param.device": ("nvme", "AsyncIO"),
    "zero_quantized_weights": (True, "Quantizer"),
    "zero_quantized_gradients": (True, "Quantizer"),
    "zero_quantized_nontrainable_weights": (True, "Quantizer"),
}
"""Path under zero_optimization -> the value that needs an op of C++, and that op."""


class _Asked(dict[str, Any]):
    """Settings that note which of them are asked for.

    DeepSpeed ignores a key that it does not know.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Asked:
        return self


def check(settings: Mapping[str, Any], unit_name: str) -> None:
    """Have DeepSpeed read the settings. Not collective.

    Raises:
        ConfigError: a key is unknown, a value of the wrong type, two contradict each other, or DeepSpeed has
            not here what one needs.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    # It would compare the batch size with a world that it does not know yet.
    asked = _Asked({key: settings[key] for key in settings if key != "train_batch_size"})
    try:
        DeepSpeedConfig(asked)
        problems = [
            f"{key} is not a setting of DeepSpeed{_near(key, asked.asked)}"
            for key in settings
            if key not in asked.asked
        ]
    except Exception as error:  # pydantic's, and a plain Exception here and there
        problems = list(_reasons(error))
    if problems := problems or list(_lacking(settings)):
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            f"DeepSpeed does not take what unit {unit_name!r} is set to:{listed}\nchange it in hf_ds_config",
            problems=problems,
        )


def _reasons(error: Exception) -> Iterator[str]:
    details = getattr(error, "errors", None)
    if details is None:
        yield str(error) or type(error).__name__
        return
    section = str(getattr(error, "title", "")).removeprefix("DeepSpeed").removesuffix("Config")
    for detail in details():
        path = ".".join(map(str, detail["loc"]))
        yield f"{section}: {path} is {detail['input']!r}: {detail['msg'].lower()}"


def _lacking(settings: Mapping[str, Any]) -> Iterator[str]:
    """Options that need a compiled op which this device or machine does not have."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    for path, (asked, op) in _OPS.items():
        if get(settings, f"zero_optimization.{path}") == asked:
            made: Any = device.create_op_builder(f"{op}Builder")
            if made is None or "not_implemented" in made.NAME or not made.is_compatible(verbose=False):
                yield f"{path}: {asked} needs {op}, an op that DeepSpeed cannot build here ({device._name})"


def _near(key: str, known: set[str]) -> str:
    close = get_close_matches(key, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
