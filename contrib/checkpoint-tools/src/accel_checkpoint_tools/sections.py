"""The state in a checkpoint beside its large tensors, in sections."""

from __future__ import annotations

from collections.abc import Mapping
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
    "values": "the state that accel_core.storage.save was given, but for weights",
    "data": "steps, metrics, `extra`, and the position of the dataloaders",
    "random": "random streams",
    "config": "the resolved configuration",
    "stack": "world, mesh, plugins and versions",
    "run": "state of the whole run, such as names of trackers' runs",
}
"""Section -> the state in it. State of another name is a section of its own."""

SETTINGS: Final = frozenset({"config", "stack", "run"})
"""Sections that say how the state came to be, and are not state themselves."""

_LEFT_OUT: Final = frozenset({"save_id", "run_id", "lineage", "name", "iteration", "time"})
"""Members of the manifest that differ by design: names of the run and of the save, and times."""
_FILES: Final = frozenset({"format", "version", "domains", "files", "checksum"})
"""Members of the manifest that describe the files of the save, not its state."""
_MANIFEST: Final = frozenset({"step", "metrics", "config", "stack", "world", "mesh", "versions", "random"})
_SHARED: Final = frozenset({"units", "prepared", "registered", "extra", "steps_done", "run"})
_RANK: Final = frozenset({"units", "plugins", "reader", "loaders", "random"})
_UNIT: Final = frozenset({"strategy", "models", "aliases", "extra", "optimizers", "schedulers"})
"""Members that `sections_of` puts into sections by name: of the manifest, `state.json`, a rank, a unit."""

_Told = Mapping[str, Mapping[str, Any]]
"""A unit as the run tells of it, under "", and as ranks do that have other parts of it."""


def sections_of(opened: Checkpoint) -> dict[str, Any]:
    """Return section -> nested state, as tagged JSON. All state is in one of them."""
    about, shared = opened.manifest.members, opened.state
    ranks = {f"rank{rank}": state for rank, state in sorted(opened.ranks.items())}
    units = _units(shared, ranks)
    stack = {**about["stack"], "plugins": {}}
    for name, each in about["stack"]["plugins"].items():
        stack["plugins"][name] = each["distribution"]
    return {
        **_others(about, shared, ranks, units),
        "model": {
            "": {"prepared": shared["prepared"]},
            **{name: _model(told) for name, told in units.items()},
        },
        "optimizer": {name: _optimizer(told) for name, told in units.items()},
        "hyperparameters": {name: _hyperparameters(told) for name, told in units.items()},
        "plugins": {rank: state["plugins"] for rank, state in ranks.items()},
        "registered": shared["registered"],
        "data": {
            "step": about["step"],
            "steps_done": shared.get("steps_done", []),
            "metrics": about.get("metrics", {}),
            "extra": shared.get("extra", {}),
            **{rank: {key: state[key] for key in ("reader", "loaders")} for rank, state in ranks.items()},
        },
        "random": {rank: state["random"] for rank, state in ranks.items()},
        "config": about["config"],
        "stack": {**stack, **{key: about[key] for key in ("world", "mesh", "versions", "random")}},
        "run": shared.get("run", {}),
    }


def _units(shared: Mapping[str, Any], ranks: _Told) -> dict[str, _Told]:
    units: dict[str, dict[str, Mapping[str, Any]]] = {}
    for rank, part in {"": shared, **ranks}.items():
        for name, unit in part.get("units", {}).items():
            units.setdefault(name, {})[rank] = unit
    return dict(units)


def _others(
    about: Mapping[str, Any], shared: Mapping[str, Any], ranks: _Told, units: Mapping[str, _Told]
) -> dict[str, Any]:
    """Return the state that belongs to no section of ours, by its name and then by the part that has it."""
    found: dict[str, dict[str, Any]] = {}
    parts = [("manifest", about, _MANIFEST | _LEFT_OUT | _FILES), ("", shared, _SHARED)]
    parts += [(rank, state, _RANK) for rank, state in ranks.items()]
    parts += [
        (f"unit {name} {rank}".rstrip(), unit, _UNIT)
        for name, told in units.items()
        for rank, unit in told.items()
    ]
    for part, state, known in parts:
        for key in state.keys() - known:
            section = key if key == "values" or key not in SECTIONS else f"other {key}"
            found.setdefault(section, {})[part] = state[key]
    return found


def ties_of(opened: Checkpoint) -> dict[str, list[list[str]]]:
    """Return unit -> groups of names of one weight, sorted."""
    found: dict[str, dict[str, set[str]]] = {}
    for part in [opened.state["units"], *(state.get("units", {}) for state in opened.ranks.values())]:
        for unit, each in part.items():
            for other, name in each["aliases"].items():
                found.setdefault(unit, {}).setdefault(name, {name}).add(other)
    return {unit: sorted(map(sorted, groups.values())) for unit, groups in found.items()}


def _model(told: _Told) -> dict[str, Any]:
    return {
        **_joined({rank: {"models": unit["models"]} for rank, unit in told.items()}),
        "extra": _joined({rank: unit["extra"] for rank, unit in told.items()}),
    }


def _optimizer(told: _Told) -> dict[str, Any]:
    plain: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    for rank, unit in told.items():
        for number, optimizer in enumerate(unit["optimizers"]):
            plain.setdefault(rank, {}).update(optimizer["plain"])
            rest = {key: optimizer[key] for key in optimizer.keys() - {"class", "groups", "plain"}}
            others.setdefault(rank, {}).update({str(number): rest} if rest else {})
    classes = {optimizer["class"] for unit in told.values() for optimizer in unit["optimizers"]}
    return {"classes": sorted(classes), "plain": _joined(plain), **_joined(others)}


def _hyperparameters(told: _Told) -> dict[str, Any]:
    """Return parameter -> its hyperparameters, however groups and ranks divide them; and schedulers."""
    found: dict[str, dict[str, Any]] = {}
    for rank, unit in told.items():
        groups = [group for optimizer in unit["optimizers"] for group in optimizer["groups"]]
        found[rank] = {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in groups
            for name in group["params"]
        }
    schedulers = {rank: {"schedulers": unit["schedulers"]} for rank, unit in told.items()}
    return {"parameters": _joined(found), **_joined(schedulers)}


def _joined(parts: _Told) -> dict[str, Any]:
    """Return the state that ranks tell of. State that one tells otherwise than the first has its own name."""
    joined: dict[str, Any] = {}
    for rank, part in parts.items():
        for key, value in part.items():
            if joined.setdefault(key, value) != value:
                joined[f"{key} of {rank}"] = value
    return joined
