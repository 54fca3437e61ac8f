"""Plugin names in a config, looked up before a run needs them: as `accel config check` does."""

from __future__ import annotations

from collections.abc import Iterator

from accel_core.config.reader import Problem
from accel_core.config.resolve import Resolved
from accel_core.config.schema import RunConfig
from accel_core.config.structure import Path
from accel_core.known import absence
from accel_core.plugins import Discovery, Slot

__all__ = ["misnamed"]


def misnamed(resolved: Resolved, discovery: Discovery) -> Iterator[Problem]:
    """The names that no installed plugin of their slot has.

    `device` is left out: it may also be a device type that only torch knows.
    """
    for path, slot, name in _names(resolved.config):
        record = discovery.get(name)
        if record is None or record.slot != slot:
            setting = resolved.settings.get(path)
            yield Problem(setting.origin if setting else "", path, absence(name, slot, discovery))


def _names(config: RunConfig) -> Iterator[tuple[Path, Slot, str]]:
    if config.strategy != "auto" and config.strategy not in config.strategies:
        yield ("strategy",), "strategy", config.strategy
    if config.mixed_precision != "no":
        yield ("mixed_precision",), "precision", config.mixed_precision
    yield ("launch", "launcher"), "launcher", config.launch.launcher
    for alias, options in config.strategies.items():
        yield ("strategies", alias, "plugin"), "strategy", options["plugin"]
    for name in config.extensions:
        yield ("extensions",), "extension", name
    for name in config.log_with:
        yield ("log_with",), "tracker", name
