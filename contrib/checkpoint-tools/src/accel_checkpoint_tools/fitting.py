"""Puts foreign state into a checkpoint of the same run, by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import evolve

from accel_checkpoint_tools.contents import Contents, Source
from accel_core import CheckpointError

__all__ = [
    "HOW",
    "Group",
    "names_of",
    "optimizer_tensors",
    "plugins_left_out",
    "put_no_optimizer",
    "put_no_plugins",
    "put_optimizer",
    "put_weights",
    "scalers",
    "split",
]

HOW: Final = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Hyperparameters that do not change a step's result, with torch's defaults."""

Group = tuple[Sequence[str], Mapping[str, Any]]
"""The names of a group's parameters, and its hyperparameters."""


def names_of(contents: Contents, unit: str) -> list[str]:
    """Return the names of the unit's weights and buffers."""
    keys = [key.partition("/") for owner, key in contents.tensors if owner == unit]
    return [name for sort, _, name in keys if sort == "model"]


def split(contents: Contents, unit: str) -> list[dict[str, Source]]:
    """Weights and buffers of each model of the unit, by own names, tied ones once."""
    count: int = contents.state["units"][unit].get("models", 1)
    names = names_of(contents, unit)
    if count == 1:
        return [{name: contents.tensors[unit, f"model/{name}"] for name in names}]
    found: list[dict[str, Source]] = [{} for _ in range(count)]
    for name in names:
        number, _, own = name.partition(".")
        found[int(number)][own] = contents.tensors[unit, f"model/{name}"]
    return found


def optimizer_tensors(contents: Contents, unit: str) -> Iterator[tuple[str, str, Source]]:
    """(parameter, key, tensor) of the unit's optimizers."""
    for (owner, key), source in contents.tensors.items():
        sort, _, rest = key.partition("/")
        if (owner, sort) == (unit, "optimizer"):
            name, _, part = rest.rpartition("/")
            yield name, part, source


def scalers(contents: Contents) -> list[dict[str, Any]]:
    """Return the entries of plugins with a loss scaler's state, as `scaler`."""
    return [
        entries
        for own in contents.ranks
        for scopes in own["plugins"].values()
        for plugins in scopes.values()
        for entries in plugins.values()
        if "scaler" in entries
    ]


def plugins_left_out(contents: Contents, units: Iterable[str]) -> list[str]:
    """Name the state of plugins that an export lacks.

    Loss scales are not in it: some libraries have a place for them.
    """
    units = set(units)
    plain = {
        plugin
        for own in contents.ranks
        for unit, scopes in own["plugins"].items()
        for plugins in scopes.values()
        for plugin, entries in plugins.items()
        if unit in units and "scaler" not in entries
    }
    found = plain.union(*(_with_tensors(contents, unit) for unit in units))
    return [f"the state of plugin {name}" for name in sorted(found)]


def put_no_plugins(contents: Contents, units: Iterable[str]) -> list[str]:
    """Remove what plugins have made of other weights, such as averages, and name it."""
    found: set[str] = set()
    for unit in units:
        found |= (mine := _with_tensors(contents, unit))
        for key in [key for key in contents.tensors if key[0] == unit and _plugin(key[1]) in mine]:
            del contents.tensors[key]
        for own in contents.ranks:
            for plugins in own["plugins"].get(unit, {}).values():
                for name in mine & plugins.keys():
                    del plugins[name]
    return [f"the state of plugin {name}, which begins anew" for name in sorted(found)]


def _with_tensors(contents: Contents, unit: str) -> set[str]:
    return {_plugin(key) for owner, key in contents.tensors if owner == unit} - {""}


def _plugin(key: str) -> str:
    """Return the plugin that a tensor belongs to, or nothing."""
    sort, _, rest = key.partition("/")
    return rest.partition("/")[0] if sort == "plugins" else ""


def put_weights(contents: Contents, unit: str, tensors: Mapping[str, Source], source: str) -> None:
    """Replace the unit's weights and buffers by tensors of their (tied) names.

    Raises:
        CheckpointError: names or shapes differ; all are named.
    """
    ties: Mapping[str, str] = contents.state["units"][unit]["aliases"]
    given = {ties.get(name, name): tensor for name, tensor in reversed([*tensors.items()])}
    names = names_of(contents, unit)
    problems = [f"{name} is not in it" for name in names if name not in given]
    problems += [f"{name} is in it, but not in this run" for name in given if name not in names]
    for name in names:
        shape = contents.tensors[unit, f"model/{name}"].shape
        if name in given and given[name].shape != shape:
            problems.append(f"{name} has shape {list(given[name].shape)}, here {list(shape)}")
    if problems:
        raise CheckpointError(
            f"{source} does not fit unit {unit!r}: {'; '.join(problems[:10])}\n"
            "give a checkpoint of the model that it was saved from",
            path=source,
        )
    for name in names:
        contents.tensors[unit, f"model/{name}"] = given[name]


def _require_text(name: str, odd: str, source: str) -> None:
    if odd:
        raise CheckpointError(
            f"{source}: an optimizer keeps state of {name} under {odd}, and only keys of text without '/' and"
            " '%' are converted\nresume it where it was saved, or train on with its weights only",
            path=source,
        )


def put_optimizer(
    contents: Contents,
    unit: str,
    number: int,
    groups: Sequence[Group],
    state: Mapping[str, Mapping[str, Any]],
    source: str,
) -> None:
    """Replace the state of an optimizer of the unit; `state` is by parameter name.

    Raises:
        CheckpointError: its parameters are others, or its state does not look like theirs.
    """
    described = contents.state["units"][unit]["optimizers"][number]
    mine = {name for group in described["groups"] for name in group["params"]}
    given = {name for names, _ in groups for name in names}
    if mine != given or not state.keys() <= given:
        odd = sorted(mine ^ given | (state.keys() - given))
        raise CheckpointError(
            f"{source}: parameters that only one of it and optimizer {number} of unit {unit!r} has:"
            f" {', '.join(odd[:10])}\ngive a checkpoint of the run that it was saved from",
            path=source,
        )
    # All checks come first: nothing of the contents may change if the state does not fit.
    kinds = _kinds(contents, unit, given, state, source)
    for name, key, _ in list(optimizer_tensors(contents, unit)):
        if name in mine:
            del contents.tensors[unit, f"optimizer/{name}/{key}"]
    described["groups"] = [
        {**{key: value for key, value in values.items() if key not in HOW}, "params": list(names)}
        for names, values in groups
    ]
    described["plain"] = {}
    for name, values in state.items():
        for key, value in values.items():
            if isinstance(value, Source):
                _require_text(name, "" if type(key) is str and not {*"/%"} & {*key} else repr(key), source)
                outline = value.outline._replace(kind=kinds[name, key])
                contents.tensors[unit, f"optimizer/{name}/{key}"] = evolve(value, outline=outline)
            else:
                described["plain"].setdefault(name, {})[key] = value


def put_no_optimizer(contents: Contents, unit: str) -> None:
    """Remove the state of the unit's optimizers.

    This run's moments are not those of other weights.
    """
    for name, key, _ in list(optimizer_tensors(contents, unit)):
        del contents.tensors[unit, f"optimizer/{name}/{key}"]
    for described in contents.state["units"][unit]["optimizers"]:
        described["plain"] = {}


def _kinds(
    contents: Contents,
    unit: str,
    names: Collection[str],
    state: Mapping[str, Mapping[str, Any]],
    source: str,
) -> dict[tuple[str, str], Any]:
    """Kind of each tensor of the optimizer of these parameters.

    If parameters were in another order, some tensor would be larger than its parameter, or cut otherwise.
    """
    kinds: dict[tuple[str, str], Any] = {}
    total = sum(math.prod(contents.tensors[unit, f"model/{name}"].shape) for name in names)
    tensors = [(n, k, v) for n, values in state.items() for k, v in values.items() if isinstance(v, Source)]
    for name, key, tensor in tensors:
        here, there = tensor.shape, contents.tensors[unit, f"model/{name}"].shape
        if not here:
            kinds[name, key] = "scalar"
        elif here == there:
            kinds[name, key] = "like_param"
        elif (
            here == (total,)  # all parameters in a row, as LBFGS keeps them with the first one
            or len(here) < len(there)
            or (
                len(here) == len(there)
                and all(size in (1, full) for size, full in zip(here, there, strict=True))
            )
        ):
            kinds[name, key] = "factored"
        else:
            raise CheckpointError(
                f"{source}: {key} of {name} has shape {list(here)}, the parameter {list(there)}\n"
                "the order of parameters is not that of this run; give a checkpoint of the run that saved it",
                path=source,
            )
    return kinds
