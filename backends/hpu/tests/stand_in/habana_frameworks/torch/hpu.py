"""Stands for Gaudi's torch.hpu, over the kit's simulated device."""

from __future__ import annotations

from typing import Any

from accel_testing.simulated.device import module

CACHED: list[Any] = []


class ModuleCacher:
    """As documented: made without arguments, then called with the module."""

    def __call__(self, *, model: Any, allow_unused_input: bool = False, inplace: bool = False) -> Any:
        CACHED.append((model, allow_unused_input, inplace))
        return model


def is_available() -> bool:
    return True


def device_count() -> int:
    return 1


def get_device_name() -> str:
    return "GAUDI2"


def memory_stats(device: Any = None) -> dict[str, int]:
    memory = module().memory
    return {"InUse": memory.allocated, "MaxInUse": memory.peak, "Limit": 2**36}
