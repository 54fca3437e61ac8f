"""Run a device plugin's own code on the simulated device.

Torch lets a device in Python bear any name but those it keeps for itself, and those of its own
communication backends. Where a plugin has such a one, its device is simulated as `sim` and that
name, and nothing else about the plugin is replaced.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from accel_core import discover, hooks, implements
from accel_testing.simulated.device import simulate

if TYPE_CHECKING:
    from accel_core import Run

__all__ = ["simulate_plugin", "simulated_type"]

_simulated: dict[str, Any] = {}
_HERE: Final = __name__


def simulated_type(kind: str) -> str:
    """Return the torch type that simulates `kind`. Ask before simulating."""
    try:
        torch.device(kind)
    except RuntimeError:  # torch has no such type: it can be had
        return kind
    return f"sim{kind}"


def simulate_plugin(plugin: str, communication: str, stand_in: str | None) -> None:
    """Make this process one on a machine that has one device of that plugin.

    communication: the name that the plugin gives its communication backend. stand_in: a module that
    stands for what is missing of the vendor's library; it is imported once the device is there.
    """
    record = discover().get(plugin)
    assert record is not None
    card = record.card
    assert card is not None
    kind = simulated_type(card.torch_device or plugin)
    kept = hasattr(dist.Backend, communication.upper())
    simulated = f"sim{communication}" if kept else communication
    simulate(kind, simulated)
    if stand_in is not None:
        importlib.import_module(stand_in)
    # Torch lets Python have a single device: each rank is a machine of its own.
    if "RANK" in os.environ:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        nodes = {"GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"]}
        os.environ.update(alone | nodes)
    _simulated.update(path=card.implementation, names={communication: simulated})
    # Probe and verify would look for the hardware, which nobody can simulate_plugin to have.
    there = {"probe": None, "verify": None, "torch_device": kind}
    for name, value in {**there, "implementation": f"{_HERE}:built"}.items():
        object.__setattr__(card, name, value)


def built(config: Any, run: Run) -> Any:
    """Build the plugin, with a communication backend that torch accepts."""
    module, _, name = _simulated["path"].partition(":")
    implementation = getattr(importlib.import_module(module), name)
    names: Mapping[str, str] = _simulated["names"]

    class Simulated(implementation):  # type: ignore[misc, valid-type]
        @implements(hooks.communication_backend)
        def communication_backend(self, device: torch.device) -> Mapping[str, str]:
            above = super()
            answer = getattr(above, "communication_backend", self.below.communication_backend)(device)
            return {kind: names.get(name, name) for kind, name in answer.items()}

    Simulated.__name__ = Simulated.__qualname__ = implementation.__name__
    return Simulated(config, run)
