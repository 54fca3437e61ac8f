"""The options of section `dispatched`."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["DispatchedPlugin"]


@frozen(kw_only=True)
class DispatchedPlugin(KwargsHandler):
    """Options of models larger than a device. Section `dispatched`."""

    memory: Mapping[str, int | str] | None = option(
        None,
        help="Place (a device, cpu, disk) -> bytes it may hold, or text such as 10GiB; unset: what is free.",
    )
    device_map: Mapping[str, str] | None = option(
        None, help="Module or weight -> its place, instead of a plan by memory."
    )
    whole: tuple[str, ...] = option(
        (),
        converter=tuple,
        help="Classes of modules that are never split; unset: the model's own, or its lists' blocks.",
    )
    folder: str | None = option(
        None, help="Folder for weights that go to disk and are in no file yet; unset: a temporary one."
    )
