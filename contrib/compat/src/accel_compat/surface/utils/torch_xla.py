"""Installing torch_xla."""

from __future__ import annotations

from typing import NoReturn

from accel_compat.refusing import NotServedError
from accel_core import install_hint


def install_xla(upgrade: bool = False) -> NoReturn:
    """Refused: a program does not install packages; `accel plugins doctor xla` says which it lacks."""
    raise NotServedError(
        "install_xla: accel-core installs nothing while a program runs\n"
        + install_hint("backends/xla[runtime]")
    )
