"""MegatronLMPlugin: fields that variables fill; accel-megatron trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

from accel_compat.configs.translation import Translated
from accel_compat.settings import MEGATRON, settings

T = TypeVar("T")

_ROWS: Final = {
    name.removeprefix(MEGATRON): row for name, row in settings().items() if name.startswith(MEGATRON)
}
"""Field that a variable fills -> its row, in the order of the arguments."""
_STEPS: Final = (
    "custom_train_step_class",
    "custom_train_step_kwargs",
    "custom_get_batch_function",
    "custom_loss_function",
)
"""Fields that a train step is made of, in Megatron-LM's words."""


def _with_rows(cls: type[T]) -> type[T]:
    """Make the decorated class a dataclass whose first fields are those of the rows."""
    cls.__annotations__ = {**dict.fromkeys(_ROWS, Any), **cls.__annotations__}
    for name in _ROWS:
        setattr(cls, name, None)
    return dataclass(cls)


@_with_rows
class MegatronLMPlugin(Translated):
    """Options of Megatron. MEGATRON_LM_ variables fill what is not given."""

    ours: ClassVar[str] = "accel_megatron:MegatronLMPlugin"

    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._given = {
            name for name in _ROWS if getattr(self, name) is not None or os.environ.get(_ROWS[name].variable)
        }
        for name, row in _ROWS.items():
            if getattr(self, name) is None:
                setattr(self, name, row.read_variable())
        if self.consumed_samples is not None:
            self.consumed_samples += [0] * (3 - len(self.consumed_samples))  # one each of train, eval, test

    def translation(self) -> dict[str, Any]:
        """Return the given fields, defaults too: accel-megatron has other defaults."""
        given = {**super().translation(), **{name: getattr(self, name) for name in self._given}}
        given.setdefault("gradient_clipping", self.gradient_clipping)  # Accelerate clips unasked
        given["average_losses"] = True  # Megatron-LM's loss is that of the whole batch
        if any(getattr(self, name) is not None for name in _STEPS):
            given = {name: value for name, value in given.items() if name not in _STEPS}
            given["custom_train_step_class"] = self._chosen()
        native = {name: row.native_name for name, row in _ROWS.items() if row.native_name and name in given}
        values = {native[name]: (_ROWS[name], given.pop(name)) for name in native}
        more = {name: value for name, (row, value) in values.items() if not row.is_off(value)}
        if more:
            given["other_megatron_args"] = {**more, **given.get("other_megatron_args", {})}
        return given

    def _chosen(self) -> Any:
        from accel_compat.modeling.megatron_steps import ChosenStep

        if self.return_logits:
            raise ValueError(
                "return_logits: a train step's model gives losses, and no logits\n"
                "put logits under that name into the dict that its loss function gives"
            )
        return partial(ChosenStep, self)

    def to_ours(self) -> object:
        """Return the same settings, as an object of ours; what is set later are `news`."""
        self._said = self.translation()
        return super().to_ours()

    def news(self) -> dict[str, Any]:
        """Fields that were set since `to_ours`, by the names of ours."""
        said = self.__dict__.get("_said", {})
        return {
            name: value
            for name, value in self.translation().items()
            if name not in said or said[name] != value
        }
