"""Odd but right plugins: the kit must find nothing wrong with them.

late: the device reduces gradients itself, when the window ends (as lazy devices do).
lazy: the device must be told before the host reads, and notices when core reads unannounced.
pair: several processes read the same share of the data (as tensor parallelism does).
grid: some do, by a mesh of two dimensions, of which core knows one.
absent: made for hardware that is not here; checked on the simulated device, under its own name.
early: the vendor's library reads its variable when it is imported, and never again.
scheduled: the strategy runs forward and backward.
narrow: so does this one, of one kind of network, and in windows of two micro-batches or more.
coarse: a precision whose numbers are those of its own reference, not of float32.
first, second: two extensions of one run.
"""

from __future__ import annotations

import os
from typing import Any

from accel_core import Card


def probe() -> None:
    """The earliest moment at which a test's broken core can be put in place in a worker."""
    if "BREAK_CORE" in os.environ and "RANK" in os.environ:
        import unusual_plugins.broken_core

        getattr(unusual_plugins.broken_core, os.environ["BREAK_CORE"])()


DEVICE_WORDS = {"bf16", "fp16", "float64", "memory_stats", "rng", "process_per_device", "collectives.torch"}


def device(name: str, **more: Any) -> Card:
    given = {
        "torch_device": "sim",
        "probe": probe,
        "implementation": f"unusual_plugins.devices:{name.title()}",
    }
    return Card(
        name=name,
        slot="device",
        summary=f"An unusual plugin: {name}.",
        api_version="1.0",
        offers=DEVICE_WORDS,
        **{**given, **more},
    )


def strategy(name: str, **more: Any) -> Card:
    return Card(
        name=name,
        slot="strategy",
        summary=f"An unusual plugin: {name}.",
        api_version="1.0",
        probe=probe,
        offers={"no_sync", "local_sgd", "several_optimizers", "whole_weights"},
        implementation=f"unusual_plugins.strategies:{name.title()}",
        **more,
    )


LATE = device("late")
LAZY = device("lazy")
ABSENT = device(
    "absent",
    probe=lambda: "this machine has no such device",
    torch_device="absent",
    communication_backend="absentccl",
    implementation="unusual_plugins.absent:Absent",
)
EARLY = device("early", launch_environment="unusual_plugins.light:launch_environment")
REPLICAS = strategy("replicas")
PAIR = strategy("pair")
GRID = strategy("grid")
SCHEDULED = strategy("scheduled")
NARROW = strategy("narrow")
COARSE = Card(
    name="coarse",
    slot="precision",
    summary="An unusual plugin: coarse.",
    config="unusual_plugins.coarse:CoarseConfig",
    api_version="1.0",
    implementation="unusual_plugins.coarse:Coarse",
)
FIRST, SECOND = (
    Card(
        name=name,
        slot="extension",
        summary=f"An unusual plugin: {name}.",
        config=f"unusual_plugins.watching:{name.title()}Config",
        api_version="1.0",
        implementation=f"unusual_plugins.watching:{name.title()}",
    )
    for name in ("first", "second")
)
