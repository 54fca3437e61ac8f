"""The names of a unit's parameters, fixed when its models are prepared."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, nn

_WRAPPERS: Final = {
    "_orig_mod": "torch._dynamo.",
    "_checkpoint_wrapped_module": "torch.distributed.algorithms._checkpoint.",
}
"""Parts of names that torch.compile and checkpointing add -> their modules."""
_WRAPPED: Final = re.compile("|".join(_WRAPPERS)).search


class Names:
    """The names of a unit's parameters, with tied weights and replaced parameters.

    Names are the names in the user's models, before any transform. A unit of several models prefixes each
    name with the model's number. Names lack the parts that torch's own wrappers add, so that they do not
    depend on wrapping. A tied weight has the first of its names.

    Attributes:
        models: the unit's own list of modules.
        aliases: further name of a tied weight -> its first name.
        trained: names of the parameters that prepared optimizers hold.
        known: id of a parameter -> (its name, the parameter). The entry keeps the parameter alive: its id
            could otherwise go to another object.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models
        self.aliases: dict[str, str] = {}
        self.known: dict[int, tuple[str, nn.Parameter]] = {}
        self.trained: set[str] = set()
        self._tied: set[str] = set()
        """Aliases that share a parameter with the first name; some strategies keep two parameters."""
        self._replaced: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}
        """id -> (earlier parameter, its name). Entries of dead parameters stay: iterating is safe."""
        self._renamed: list[dict[str, str]] = []
        """Per model: current name -> the user's name, if the names differ."""
        self._parts: list[list[tuple[str, str, Any]]] = []
        """Per model, during `prepare`: (name in the model, name without wrapper parts, tensor or module)."""

    # -- asked at any time ------------------------------------------------------------------------

    def all(self) -> list[tuple[str, nn.Parameter]]:
        """Return the models' present (name, parameter) pairs, tied weights under each of their names."""
        found: list[tuple[str, nn.Parameter]] = []
        for number, model in enumerate(self.models):
            named = model.named_parameters(remove_duplicate=False)
            if len(self.models) > 1 or self._renamed[number]:
                found += [(self.qualify(number, name), parameter) for name, parameter in named]
            else:  # fast path: runs for each parameter of each save
                for name, parameter in named:
                    found.append((_own_name(model, name) if _WRAPPED(name) else name, parameter))
        return found

    def qualify(self, number: int, name: str) -> str:
        """Return the kept name of `name`, a current name in model `number`."""
        renamed = self._renamed[number]
        if name in renamed:
            name = renamed[name]
        elif _WRAPPED(name):
            name = _own_name(self.models[number], name)
        return name if len(self.models) == 1 else f"{number}.{name}"

    def of(self, parameter: object) -> str | None:
        """Return the name of a present or replaced parameter; None if the unit lacks the parameter."""
        if (entry := self.known.get(id(parameter))) is not None:
            return entry[0]
        earlier, name = self._replaced.get(id(parameter), (None, None))
        return name if earlier is not None and earlier() is parameter else None

    def outlived(self) -> set[str]:
        """Return the names of replaced parameters that are still referenced."""
        return {name for earlier, name in self._replaced.values() if earlier() is not None}

    def trains_more_than(self, parameters: Iterable[object]) -> bool:
        """Return whether prepared optimizers train parameters of the unit that are not in `parameters`."""
        given = {*map(id, parameters)}
        return any(
            name in self.trained and each.requires_grad and key not in given
            for key, (name, each) in self.known.items()
        )

    # -- while models are prepared ----------------------------------------------------------------

    def begin(self, models: Iterable[nn.Module]) -> None:
        """Add models before any transform: name their parts, and find tied weights."""
        self.models.extend(map(inside, models))
        self._renamed = [{} for _ in self.models]
        self._parts = [
            [(name, _own_name(model, name) if _WRAPPED(name) else name, part) for name, part in _parts(model)]
            for model in self.models
        ]
        for name, parameter in self.update():
            if (first := self.known[id(parameter)][0]) != name:
                self.aliases[name] = first

    def replace(self, number: int, model: nn.Module) -> None:
        """Replace model `number` by its transformed or wrapped form; parts keep their names."""
        model, users = inside(model), dict[int, list[str]]()
        for _, name, part in self._parts[number]:
            users.setdefault(id(part), []).append(name)
        old = {name for name, _, _ in self._parts[number]}
        new = [(name, part) for name, part in _parts(model) if name not in old]
        renamed = {name: users[id(part)].pop(0) for name, part in new if users.get(id(part))}
        before = self._renamed[number] if model is self.models[number] else {}
        self._renamed[number] = {**renamed, **before}
        self.models[number] = model

    def rename(self, number: int, names: Mapping[str, str]) -> None:
        """Keep parts of model `number` under other names. names: current name -> kept name."""
        self._renamed[number].update(names)

    def update(self) -> list[tuple[str, nn.Parameter]]:
        """Record and return the models' present parameters; keep only weak references to replaced ones."""
        before, self.known, now = self.known, {}, self.all()
        for name, parameter in now:
            self.known.setdefault(id(parameter), (name, parameter))
        for key, (name, parameter) in before.items():
            if key not in self.known:
                self._replaced[key] = weakref.ref(parameter), name
        return now

    def end(self, trained: Iterable[str]) -> None:
        """Record parameters and ties after wrapping. trained: names of the parameters in new optimizers."""
        now = dict(self.update())
        if self._parts:  # empty if an optimizer joined later without new models
            owners = {alias: now.get(first) for alias, first in self.aliases.items() if alias in now}
            self._tied = {alias for alias, owner in owners.items() if now[alias] is owner}
        self._parts = []
        self.trained.update(trained)

    # -- later ------------------------------------------------------------------------------------

    def drop_cut_ties(self) -> None:
        """Forget ties of weights that were one parameter when prepared and are two now."""
        now = dict(self.all()) if self._tied else {}
        for alias in [name for name in self._tied if name in now and self.aliases.get(name) in now]:
            if now[alias] is not now[self.aliases[alias]]:
                self._tied.discard(alias)
                del self.aliases[alias]


def inside(model: Any) -> Any:
    """Return the module inside `torch.compile(model)`; other objects are returned unchanged."""
    compiled = type(model).__module__.startswith("torch._dynamo.")
    return model._modules["_orig_mod"] or model if compiled else model


def _parts(model: nn.Module) -> list[tuple[str, Tensor | nn.Module]]:
    """Return all named modules, parameters and buffers of the model."""
    return [
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _own_name(model: nn.Module, name: str) -> str:
    """Return the name without the parts that torch's own wrappers add.

    A user's child module that has a wrapper's attribute name keeps its name.
    """
    module: nn.Module | None = model
    kept = []
    for part in name.split("."):
        home = _WRAPPERS.get(part)
        if home is None or not any(kind.__module__.startswith(home) for kind in type(module).__mro__):
            kept.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)
