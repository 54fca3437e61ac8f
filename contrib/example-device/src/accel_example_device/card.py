"""What accel-core reads of this package: no torch here, no vendor library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING

from attrs import frozen

from accel_core import Card, hooks, implements, option

if TYPE_CHECKING:
    from accel_core import RunConfig, World

__all__ = ["EXAMPLE", "ExampleConfig", "ExampleLaunch", "probe"]


@frozen(kw_only=True)
class ExampleConfig:
    """Section `example` of accel.yaml, flags `--example.…`, variables `ACCEL__EXAMPLE__…`."""

    log_level: int = option(0, minimum=0, help="What the chip's runtime writes about itself; 0: nothing.")


def probe() -> str | None:
    """None if the device can be used here, else why not. A chip would look for its device node."""
    version = metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        return f"its pretended chip needs torch >= 2.10, this is {version}"
    return None


class ExampleLaunch:
    """What is asked before workers start, and before the vendor's library is imported."""

    @implements(hooks.visible_devices)
    def visible_devices(self, config: RunConfig) -> tuple[str, int]:
        variable = "EXAMPLE_VISIBLE_DEVICES"
        visible = os.environ.get(variable, "0,1")
        return variable, len([entry for entry in visible.split(",") if entry])

    @implements(hooks.launch_environment)
    def launch_environment(self, config: RunConfig, world: World) -> Mapping[str, str]:
        options = config.plugins.get("example")
        return {"EXAMPLE_LOG_LEVEL": str(getattr(options, "log_level", 0))}


EXAMPLE = Card(
    name="example",
    slot="device",
    summary="A pretended chip: CPU memory behind a torch device type of its own.",
    api_version="1.0",
    priority=None,  # only when named; a chip that is really there says 100
    torch_device="example",
    offers={
        "bf16",
        "collectives.torch",
        "float64",
        "fp16",
        "memory_stats",
        "process_per_device",
        "rng",
    },
    probe=probe,
    launch="accel_example_device.card:ExampleLaunch",
    config="accel_example_device.card:ExampleConfig",
    implementation="accel_example_device.device:ExampleDevice",
)
