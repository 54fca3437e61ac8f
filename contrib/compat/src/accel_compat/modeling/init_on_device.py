"""Models made on the meta device, or on another one, from the start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accel_compat.environment.variables import parse_flag_from_env


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Make modules with parameters on the meta device, in this thread.

    include_buffers: their buffers too. Default: as ACCELERATE_INIT_INCLUDE_BUFFERS says.
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of modules that this thread makes in a context on a device.

    Ties stay.

    include_buffers: buffers too, and whatever else is made without a device.
    """
    device = torch.device(device)
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    if include_buffers:
        with device:
            yield
        return
    with _patched():
        _here.devices = [*_devices(), device]
        try:
            yield
        finally:
            _here.devices.pop()


_here = threading.local()
_lock = threading.Lock()
_users: list[object] = []
_torchs: list[Any] = [nn.Module.register_parameter]


def _devices() -> list[torch.device]:
    """Devices for parameters that this thread registers, the innermost last."""
    found: list[torch.device] = getattr(_here, "devices", [])
    return found


@contextmanager
def _patched() -> Iterator[None]:
    """While any thread is inside, modules register parameters by `_register`."""
    with _lock:
        if not _users:
            _torchs[0] = nn.Module.register_parameter
            nn.Module.register_parameter = _register  # type: ignore[method-assign, assignment]
        _users.append(_here)
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users:
                nn.Module.register_parameter = _torchs[0]  # type: ignore[method-assign]


def _register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _torchs[0](module, name, param)
    if param is None or not _devices():
        return
    moved = param.to(_devices()[-1])
    if moved is param:  # there already, and maybe shared
        return
    attributes, kind = dict(vars(param)), type(param)
    if kind is nn.Parameter:
        made = nn.Parameter(moved, requires_grad=param.requires_grad)
        vars(made).update(attributes)
    else:  # such as those of quantized weights, made from their attributes
        known = attributes.pop("_is_hf_initialized", None)
        made = kind(moved, **{**attributes, "requires_grad": param.requires_grad})
        if known is not None:
            made._is_hf_initialized = known  # type: ignore[attr-defined]
    module._parameters[name] = made
