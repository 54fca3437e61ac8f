"""Building models sharded from the start.

DeepSpeed's zero.Init, and the settings that transformers reads for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_deepspeed import settings
from accel_deepspeed.compat import deepspeed_for, quiet
from accel_deepspeed.hf_config import HfDeepSpeedConfig

if TYPE_CHECKING:
    from accel_core import Run
    from accel_deepspeed.config import DeepSpeedPlugin

__all__ = ["sharded_init"]


@contextmanager
def sharded_init(user: object, config: DeepSpeedPlugin, run: Run) -> Iterator[None]:
    """Each module built inside keeps its shard of its parameters only. Collective.

    Inside, and only there, transformers' `from_pretrained` finds the settings it shards by.
    """
    told = _settings(config, run)
    with _told_transformers(told), quiet(), deepspeed_for(run, user).zero.Init(config_dict_or_path=told):
        yield


def _settings(config: DeepSpeedPlugin, run: Run) -> dict[str, Any]:
    """Return the settings that matter for building, without unknown "auto"s."""
    made = config.deepspeed_config
    zero = made.get("zero_optimization", {})
    for path in settings.autos(zero):
        *sections, key = path.split(".")
        del settings.get(zero, ".".join(sections), zero)[key]
    precision = run.config.mixed_precision
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": precision == "fp16"},
        "bf16": {"enabled": precision == "bf16"},
    }


@contextmanager
def _told_transformers(told: dict[str, Any]) -> Iterator[None]:
    if "transformers" not in sys.modules:
        yield
        return
    theirs: Any = import_module("transformers.integrations.deepspeed")

    before = theirs._hf_deepspeed_config_weak_ref
    held = HfDeepSpeedConfig(told)  # they keep a weak reference
    theirs.set_hf_deepspeed_config(held)
    try:
        yield
    finally:
        theirs._hf_deepspeed_config_weak_ref = before
