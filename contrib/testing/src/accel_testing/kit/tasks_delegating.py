"""The stack under test with hooks that only call the layer below, which must change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from accel_core import hooks, implements
from accel_testing.kit.tasks_training import Recipe, recipe_accelerator, train, weights

__all__ = ["LAYERS", "NOBODY", "trained"]

LAYERS: Final = ("device", "precision", "strategy", "extension")
"""Slots of plugins that have layers below them and take part in a training."""
NOBODY: Final = "no hook"
"""The name of the training without a delegated hook."""
RECIPE: Final = Recipe(batches=4, epochs=1, accumulation=2, clip_norm=0.1, schedule=True)


def trained(
    implementations: Sequence[tuple[str, str]], folder: str, arguments: Mapping[str, Any]
) -> dict[str, list[float] | str]:
    """Train once for each hook that a plugin of the stack delegates; hook -> norms and weights, or the error.

    implementations: (path of the class that a card names, slot) of each plugin.
    """
    found: dict[str, list[float] | str] = {}
    delegated = [NOBODY]
    with ExitStack() as patches:
        for path, slot in implementations:
            module, _, name = path.partition(":")
            made = _delegating(getattr(import_module(module), name), slot, delegated)
            patches.enter_context(patch.object(import_module(module), name, made))
        for hook in (NOBODY, *_hooks()):
            delegated[0] = hook
            try:
                found[hook] = _train(Path(folder, hook), arguments)
            except Exception as error:  # other people's code, of any kind: the check names the hook
                found[hook] = f"{type(error).__name__}: {error}"
    return found


def _train(folder: Path, arguments: Mapping[str, Any]) -> list[float]:
    """Return gradient norms, and the weights after a training and after a load of its checkpoint."""
    accelerator = recipe_accelerator(RECIPE, arguments)
    try:
        trace = train(RECIPE, accelerator)
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        return [*trace.norms, *trace.weights, *weights(accelerator.run.units[0].wrapped[0], accelerator)]
    finally:
        accelerator.end_training()


def _hooks() -> Iterator[str]:
    """Yield the hooks that a run calls; a launcher's come before it."""
    for name, spec in vars(hooks).items():
        if hasattr(spec, "accel_spec") and not spec.__module__.endswith(".launcher"):
            yield name


def _delegating(made_by: Any, slot: str, delegated: Sequence[str]) -> Any:
    """Return a class or function that makes a plugin which delegates the hook that is named by then."""

    def delegate(plugin: Any) -> Any:
        kind, spec = type(plugin), getattr(hooks, delegated[0], None)
        may = spec is not None and not (slot == "extension" and spec.accel_spec.kind == "owner")
        if may and not hasattr(kind, delegated[0]):
            metaclass: Any = type(kind)
            plugin.__class__ = metaclass(kind.__name__, (kind,), {delegated[0]: _method(spec)})
        return plugin

    def init(self: Any, config: Any, run: Any) -> None:
        made_by.__init__(self, config, run)
        delegate(self)

    if isinstance(made_by, type):  # others of its package ask whether a plugin is of the class
        return type(made_by)(made_by.__name__, (made_by,), {"__init__": init})
    return lambda config, run: delegate(made_by(config, run))


def _method(spec: Any) -> Any:
    """Return a method around the layer below, so that core cannot tell that it does nothing of its own."""
    names = ", ".join(inspect.signature(spec).parameters)
    arguments = f", {names}" if names else ""
    source = (
        f"def {spec.__name__}(self{arguments}):\n"
        f"    answer = self.below.{spec.__name__}({names})\n"
        "    return answer"
    )
    made: dict[str, Any] = {}
    exec(source, made)  # noqa: S102  of the names of our own specs
    mark: Any = implements(spec)
    return mark(made[spec.__name__])
