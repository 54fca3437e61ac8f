"""Device plugin `musa`: Moore Threads GPUs.

Core's base layer runs the device through `torch.musa`; this module adds the parts that are specific to the
vendor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel_core import hooks, implements
from accel_musa.card import VISIBLE
from accel_musa.config import MusaConfig

if TYPE_CHECKING:
    from accel_core import Run, RunConfig, World

__all__ = ["MusaDevice", "environment_report", "vendor", "verify"]


def vendor() -> Any:
    """Return torch_musa's device module; importing torch_musa registers the device type `musa` with torch."""
    import torch_musa  # noqa: F401

    return torch.get_device_module("musa")


def verify() -> str | None:
    """Return the reason why torch cannot compute on a GPU here; None if it can."""
    try:
        musa = vendor()
    except (
        ImportError
    ) as error:  # torch_musa's own message blames the current folder for every missing library
        return f"torch_musa does not load: {error.__cause__ or error}"
    if musa.is_available():
        return None
    return "torch_musa loads but finds no usable GPU; mthreads-gmi says whether the driver works"


class MusaDevice:
    """Device `musa`."""

    below: Any

    def __init__(self, config: MusaConfig | None, run: Run) -> None:
        self.config = config or MusaConfig()
        self.run = run
        self.musa = vendor()

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        device: torch.device = self.below.select_device(world)
        if self.config.allow_tf32 is not None:
            _mudnn().allow_tf32 = self.config.allow_tf32
        return device

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        # is_backend_available is not used: in the vendor's torch it is True for builds without MCCL too.
        has_backend = config.process_group.backend or "mccl" in dist.Backend.backend_list
        if self.run.world.size == 1 or has_backend:
            return ()
        reason = (
            f"torch_musa {metadata.version('torch_musa')} was built without MCCL, which carries tensors"
            " between GPUs (S80 and S3000 have no MCCL)\n"
            "install a build that has it, or train in one process: accel launch -n 1"
        )
        return [reason]

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        # On chips before the S4000 (capability 2.2) torch_musa stores bfloat16 but cannot compute with it.
        return (
            capabilities
            if self.musa.is_bf16_supported(including_emulation=False)
            else capabilities - {"bf16"}
        )


def _mudnn() -> Any:
    """Return the module with torch_musa's switches."""
    return torch.backends.mudnn  # type: ignore[attr-defined]  # torch_musa puts it there


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    musa = vendor()
    report = {
        "torch_musa": metadata.version("torch_musa"),
        VISIBLE: os.environ.get(VISIBLE, "unset"),
        "TF32 for float32": str(_mudnn().allow_tf32),
    }
    for index in range(musa.device_count()):
        about = musa.get_device_properties(index)
        report[f"MUSA {index}"] = f"{about.name}, capability {about.major}.{about.minor}"
    return report
