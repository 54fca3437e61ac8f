"""What the host of plugins costs: finding twelve backends, binding all hooks of a run, one adapted call.

`python host.py` prints the rows. Best of many; there is nothing of others to compare with.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from timeit import repeat

from arena import HERE, Row, table

from accel_core.contract import hooks as hookspecs
from accel_core.contract.bound import Steps
from accel_core.contract.hooks import implements
from accel_core.plugins.discovery import _discover, _entry_points, discover
from accel_core.plugins.manager import LAYERS, PluginManager


def measure(peers: str | None = None, count: int = 15) -> list[Row]:
    return [_discovery(count), _binding(count), _adapter(count)]


def _best(
    call: Callable[[], object] | str, count: int, number: int = 1, names: dict[str, object] | None = None
) -> float:
    """Seconds of a call, or of a statement with these names."""
    return min(repeat(call, number=number, repeat=count, globals=names)) / number


def _discovery(count: int) -> Row:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from generated_backends import generate_backends

    with TemporaryDirectory() as folder:
        generate_backends(Path(folder))
        sys.path.insert(0, folder)
        found = 1e3 * _best(_discover_anew, count)
        sys.path.remove(folder)
    return Row("discovery of 12 backends", None, None, None, found, "≤ 5 ms", "ms")


def _discover_anew() -> None:
    _discover.cache_clear(), _entry_points.cache_clear()
    discover({}).of("device")


def _binding(count: int) -> Row:
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "accel_spec")]
    plugins = {slot: _plugin(hooks[::4], 1) for slot in ("device", "precision", "strategy")}
    plugins = {"base": _plugin(hooks, None), **plugins}

    def bind() -> None:
        manager = PluginManager()
        for slot, each in plugins.items():
            manager.add_plugin(each, name=slot, slot=slot)
        stack = manager.hooks_of([*plugins])
        for view in (stack, *(stack.below_layer(LAYERS[slot]) for slot in plugins if slot != "base")):
            for hook in hooks:
                getattr(view, hook)
        Steps(stack)

    what = f"binding all {len(hooks)} hooks of a run of 4 plugins"
    return Row(what, None, None, None, 1e3 * _best(bind, count), "≤ 10 ms", "ms")


def _plugin(hooks: list[str], parameters: int | None) -> object:
    """A plugin that implements these hooks, taking only so many of their parameters."""

    def method(hook: str) -> Callable[..., None]:
        spec = getattr(hookspecs, hook)
        taken = [*inspect.signature(spec).parameters][:parameters]
        return implements(spec)(eval(f"lambda {', '.join(['self', *taken])}: None"))

    return type("Plugin", (), {hook: method(hook) for hook in hooks})()


def _adapter(count: int) -> Row:
    plugin = _plugin(["backward"], 2)
    manager = PluginManager()
    manager.add_plugin(plugin, name="old", slot="strategy")
    adapted = manager.hooks_of(["old"]).backward
    # As statements: a call with *arguments would cost more than the adapter.
    every = ", ".join(inspect.signature(hookspecs.backward).parameters)
    names = dict.fromkeys(inspect.signature(hookspecs.backward).parameters) | {"adapted": adapted}
    names["method"] = plugin.backward
    adapting, plain = (_best(call, count, 20_000, names) for call in (f"adapted({every})", "method(1, 2)"))
    what = "a hook that takes fewer arguments, over its method"
    return Row(what, None, None, None, 1e6 * (adapting - plain), "≤ 0.06 µs", "µs")


if __name__ == "__main__":
    print(table(measure()))
