"""A package declares hooks, and other packages implement them by name."""

from __future__ import annotations

from types import ModuleType

import pytest

from accel_core.contract.bound import merge
from accel_core.contract.hooks import implements
from accel_core.contract.spec import spec
from accel_core.errors import PluginError
from accel_core.plugins.manager import PluginManager


@spec("everyone", merge)
def health(device: str) -> dict[str, int]: ...


SPECS = ModuleType("accel_stable.hooks")
SPECS.health = health


class Pony:
    @implements("stable.health")
    def legs(self, device):
        return {device: 4}


def manager_with(*plugins):
    manager = PluginManager()
    for number, plugin in enumerate(plugins):
        manager.add_plugin(plugin, name=f"pony{number}", slot="extension", origin="accel-pony 0.3")
    return manager


def test_a_hook_of_a_package_is_called_by_its_name():
    manager = PluginManager()
    manager.add_package_specs("stable", SPECS)
    manager.add_plugin(Pony(), name="pony", slot="tracker" if health.accel_spec.observer else "device")

    assert manager.hooks_of(["pony"])["stable.health"]("left") == {"left": 4}


def test_a_hook_of_a_package_that_is_absent_is_never_called():
    hooks = manager_with(Pony()).hooks_of(["pony0"])

    assert hooks.implementations("stable.health") == []
    with pytest.raises(AttributeError, match="there is no hook 'stable.health'"):
        hooks["stable.health"]


def test_a_hook_of_a_package_without_implementation_has_an_empty_answer():
    manager = manager_with()
    manager.add_package_specs("stable", SPECS)

    assert manager.hooks_of([])["stable.health"]("left") == {}


def test_specs_may_come_after_the_plugin_and_are_compared_with_it():
    class Wrong:
        @implements("stable.health")
        def health(self, hoof): ...

    manager = manager_with(Pony())
    manager.add_package_specs("stable", SPECS)
    assert manager.hooks_of(["pony0"])["stable.health"]("left") == {"left": 4}

    with pytest.raises(PluginError, match="'hoof'} are declared in the hookimpl"):
        manager.add_plugin(Wrong(), name="wrong", slot="device")


def test_the_names_of_two_packages_do_not_clash():
    manager = manager_with(Pony())
    for package in ("stable", "meadow"):
        manager.add_package_specs(package, SPECS)
    hooks = manager.hooks_of(["pony0"])

    assert hooks["stable.health"]("left") == {"left": 4}
    assert hooks["meadow.health"]("left") == {}
