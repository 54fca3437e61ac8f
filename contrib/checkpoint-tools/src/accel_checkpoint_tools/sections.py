"""The state in a checkpoint beside its large tensors, in sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from accel_core import Checkpoint

__all__ = ["SECTIONS", "SETTINGS", "sections_of", "ties_of"]

SECTIONS: Final[Mapping[str, str]] = {
    "model": "weights, buffers, ties and other entries of the models",
    "optimizer": "tensors and other state of the optimizers",
    "hyperparameters": "hyperparameters by parameter, and schedulers",
    "plugins": "state that plugins keep, such as loss scales",
    "registered": "registered objects",
    "data": "the step, `extra`, and the position of the dataloaders",
    "random": "random streams",
    "config": "the resolved configuration",
    "stack": "world, mesh, plugins and versions",
}
"""Section -> the state in it."""

SETTINGS: Final = frozenset({"config", "stack"})
"""Sections that say how the state came to be, and are not state themselves."""


def sections_of(opened: Checkpoint) -> dict[str, Any]:
    """Return section -> nested state, as tagged JSON.

    Names of the run, of the save and of trackers' runs, and times, are left out: they differ by design.
    """
    about, shared = opened.manifest.members, opened.state
    ranks = {f"rank{rank}": state for rank, state in sorted(opened.ranks.items())}
    parts = [shared["units"], *(state["units"] for state in ranks.values() if "units" in state)]
    units = {name: [part[name] for part in parts if name in part] for part in parts for name in part}
    stack = {**about["stack"], "plugins": {}}
    for name, each in about["stack"]["plugins"].items():
        stack["plugins"][name] = each["distribution"]
    return {
        "model": {
            "prepared": shared["prepared"],
            **{name: _model(told) for name, told in units.items()},
        },
        "optimizer": {name: _optimizer(told) for name, told in units.items()},
        "hyperparameters": {
            name: {"parameters": _hyperparameters(told), "schedulers": told[0]["schedulers"]}
            for name, told in units.items()
        },
        "plugins": {rank: state["plugins"] for rank, state in ranks.items()},
        "registered": shared["registered"],
        "data": {
            "step": about["step"],
            "extra": shared.get("extra", {}),
            **{rank: {key: state[key] for key in ("reader", "loaders")} for rank, state in ranks.items()},
        },
        "random": {rank: state["random"] for rank, state in ranks.items()},
        "config": about["config"],
        "stack": {**stack, **{key: about[key] for key in ("world", "mesh", "versions")}},
    }


def ties_of(opened: Checkpoint) -> dict[str, list[list[str]]]:
    """Return unit -> groups of names of one weight, sorted."""
    found: dict[str, dict[str, set[str]]] = {}
    for part in [opened.state["units"], *(state.get("units", {}) for state in opened.ranks.values())]:
        for unit, each in part.items():
            for other, name in each["aliases"].items():
                found.setdefault(unit, {}).setdefault(name, {name}).add(other)
    return {unit: sorted(map(sorted, groups.values())) for unit, groups in found.items()}


def _model(told: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {"models": told[0]["models"], "extra": _joined(each["extra"] for each in told)}


def _optimizer(told: list[Mapping[str, Any]]) -> dict[str, Any]:
    optimizers: list[Mapping[str, Any]] = []
    for optimizer in (optimizer for each in told for optimizer in each["optimizers"]):
        if _parameters(optimizer) not in map(_parameters, optimizers):  # as a load has it: the first is right
            optimizers.append(optimizer)
    return {
        "classes": sorted({optimizer["class"] for optimizer in optimizers}),
        "plain": _joined(optimizer["plain"] for optimizer in optimizers),
    }


def _parameters(optimizer: Mapping[str, Any]) -> list[str]:
    return [name for group in optimizer["groups"] for name in group["params"]]


def _hyperparameters(told: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return parameter -> its hyperparameters, however groups and ranks divide them."""
    groups = [group for each in told for optimizer in each["optimizers"] for group in optimizer["groups"]]
    found: dict[str, Any] = {}
    for group in groups:
        values = {key: value for key, value in group.items() if key != "params"}
        found.update({name: values for name in group["params"] if name not in found})
    return found


def _joined(parts: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several ranks have told; where two tell of one thing, the first."""
    joined: dict[str, Any] = {}
    for part in parts:
        joined = {**part, **joined}
    return joined
