"""Run a device plugin's own code on the simulated device.

Torch lets a device in Python bear any name but those it keeps for itself, and those of its own
communication backends. Where a plugin has such a one, its device is simulated as `sim` and that
name, and nothing else about the plugin is replaced.
"""

from __future__ import annotations

import importlib
import os

import torch
import torch.distributed as dist

from accel_core import discover
from accel_testing.simulated.device import simulate

__all__ = ["simulate_plugin", "simulated_type"]


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
    # Probe and verify would look for the hardware, which nobody can simulate_plugin to have.
    record.card = card._replace(probe=None, verify=None, torch_device=kind, communication_backend=simulated)
