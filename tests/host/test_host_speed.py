"""The host's own cost, printed (`pytest -s`) and held to its bars. Best of many: the machine is shared."""

from __future__ import annotations

import inspect
import sys
import time
import timeit

import attrs
import pytest
import toy_specs
from generated import generate_backends

from accel_core import hookspecs
from accel_core.binding import LAYERS, Binder, Steps
from accel_core.hookspecs import implements
from accel_core.plugins import discover, load


def best_ms(call, times: int = 20) -> float:
    return 1e3 * min(timeit.repeat(call, number=1, repeat=times))


def report(what: str, figure: str, bar: str) -> None:
    print(f"{what}: {figure} (bar {bar})")


def test_discovering_12_backends_costs_at_most_5_ms_beyond_importing_their_cards(tmp_path, monkeypatch):
    names = generate_backends(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    discover({})  # imports the cards

    figure = best_ms(lambda: discover({}))
    report("discovery of 12 generated backends, cards imported", f"{figure:.2f} ms", "5 ms")
    assert {record.name for record in discover({}).records} >= set(names)
    assert figure <= 5


def test_discovery_imports_neither_configs_nor_implementations(tmp_path, monkeypatch):
    for name in generate_backends(tmp_path / "fresh", count=2):
        package = f"accel_{name.replace('-', '_')}"
        for module in [loaded for loaded in sys.modules if loaded.startswith(package)]:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path / "fresh")
    discover({})

    assert "accel_generated_0.card" in sys.modules
    assert not {"accel_generated_0.config", "accel_generated_0.plugin"} & set(sys.modules)


class Long:
    @implements(toy_specs.backward)
    def backward(self, unit, loss, boundary): ...


class Short:
    @implements(toy_specs.backward)
    def backward(self, unit, loss): ...


def test_an_adapter_costs_at_most_60_ns_over_the_method():
    binder = Binder(toy_specs)
    plugin = Short()
    adapted = binder.hooks([binder.register(plugin, name="old", slot="strategy")]).backward
    method = plugin.backward

    def nanoseconds(call) -> float:
        return 1e9 * min(timeit.repeat(call, number=20_000, repeat=15)) / 20_000

    figure = nanoseconds(lambda: adapted("u", 1.0, True)) - nanoseconds(lambda: method("u", 1.0))
    report("adapter over the method itself", f"{figure:.0f} ns", "60 ns")
    assert figure <= 60


def plugin_of(hooks: list[str], parameters: int | None = None) -> object:
    """A plugin that implements these hooks, taking only so many of their parameters."""

    def method(hook: str):
        taken = ["self", *inspect.signature(getattr(hookspecs, hook)).parameters][
            : parameters and parameters + 1
        ]
        return implements(getattr(hookspecs, hook))(eval(f"lambda {', '.join(taken)}: None"))

    return type("Plugin", (), {hook: method(hook) for hook in hooks})()


def test_binding_all_hooks_of_a_run_costs_at_most_5_ms():
    hooks = [name for name, value in vars(hookspecs).items() if hasattr(value, "accel_spec")]
    base = plugin_of(hooks)
    others = {slot: plugin_of(hooks[::4], parameters=1) for slot in ("device", "precision", "strategy")}

    def bind() -> Steps:
        binder = Binder()
        rows = [
            binder.register(each, name=slot, slot=slot) for slot, each in {"base": base, **others}.items()
        ]
        stack = binder.hooks(rows)
        for view in (stack, *(stack.under(LAYERS[slot]) for slot in others)):
            for hook in hooks:
                getattr(view, hook)
        return Steps(stack)

    started = time.perf_counter()
    bind()
    first = 1e3 * (time.perf_counter() - started)
    figure = best_ms(bind)
    report(
        f"binder, 4 plugins, all {len(hooks)} hooks, 3 views below",
        f"{figure:.2f} ms, first {first:.2f}",
        "5 ms",
    )
    assert figure <= 5


@pytest.mark.parametrize("hook", ["backward", "decide"])
def test_a_resolved_hook_is_looked_up_once(hook):
    class Both(Long):
        @implements(toy_specs.decide)
        def decide(self, unit, options): ...

    binder = Binder(toy_specs)
    stack = binder.hooks([binder.register(Both(), name="both", slot="strategy")])

    assert getattr(stack, hook) is vars(stack)[hook]


def test_a_generated_backends_config_is_a_real_one(tmp_path, monkeypatch):
    (name,) = generate_backends(tmp_path, count=1, options=7)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [loaded for loaded in sys.modules if loaded.startswith("accel_generated_0")]:
        monkeypatch.delitem(sys.modules, module)
    record = discover({}).get(name)

    assert len(attrs.fields(load(record, record.card.config))) == 7
    assert load(record, record.card.config)().option_0 == "none"
