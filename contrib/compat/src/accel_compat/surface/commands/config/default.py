"""Writing the config file that `accelerate config default` would write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch

from accel_compat.refusing import unserved

from ...utils._devices import MULTI
from .config_args import default_json_config_file

__all__ = ["write_basic_config"]


def write_basic_config(
    mixed_precision: str = "no", save_location: str = default_json_config_file
) -> Path | Literal[False]:
    """Write what this machine has, for one machine; False if there is a file already."""
    path = Path(save_location)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        print(f"Configuration already exists at {save_location}, will not override.")  # noqa: T201  as there
        return False
    if mixed_precision.lower() not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(
            "`mixed_precision` should be one of 'no', 'fp16', 'bf16', or 'fp8'. Received"
            f" {mixed_precision.lower()}"
        )
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 1 if kind is None else torch.accelerator.device_count()
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": mixed_precision.lower(),
        "num_processes": count,
        "use_cpu": kind is None,
        "distributed_type": "NO" if kind is None or count == 1 else MULTI[kind.type].value,
        "debug": False,
        "enable_cpu_affinity": False,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


__getattr__ = unserved(__name__)
