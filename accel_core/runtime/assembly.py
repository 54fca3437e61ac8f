"""The instances of a stack's plugins, and the hooks of a run and of its units."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from accel_core.config.sources import GUESSES_VARIABLE
from accel_core.contract.arguments import did_you_mean, quoted
from accel_core.defaults.base import Base
from accel_core.errors import ConfigError, PluginError
from accel_core.plugins.discovery import discover, environment_of, load, verify
from accel_core.plugins.manager import LAYERS, PluginManager
from accel_core.runtime.selection import Chosen, Stack

if TYPE_CHECKING:
    from accel_core.contract.bound import Hooks
    from accel_core.contract.card import Card
    from accel_core.contract.run import Run
    from accel_core.runtime.tracking import GeneralTracker

_users: Counter[str] = Counter()
"""Variable that runs of this process have set -> number of runs that use it."""


def apply_launch_environment(run: Run) -> list[str]:
    """Set the variables that vendor libraries read at import, until the run ends.

    Existing variables keep their values, unless a launcher guessed them. The result lists each difference.
    """
    notes, guesses = [], json.loads(os.environ.get(GUESSES_VARIABLE, "{}"))
    for chosen in run.stack.members():
        if chosen.card.launch_environment is None:
            continue
        for name, value in environment_of(chosen.record, run.config, run.world).items():
            # A launcher guesses values before the world is known: the run's values replace them.
            if not _users[name] and name in guesses and os.environ.get(name) == guesses[name]:
                del os.environ[name]
            if _users[name] or name not in os.environ:
                run.environment.append(name)
                _users[name] += 1
            if os.environ.setdefault(name, value) != value:
                whose = "another run's" if _users[name] else "yours"
                notes.append(f"{name}={os.environ[name]} is {whose}; {chosen.name} would have set {value}")
    return notes


def restore_environment(run: Run) -> None:
    """Unset the variables that `apply_launch_environment` set, unless another run uses them."""
    while run.environment:
        name = run.environment.pop()
        _users[name] -= 1
        if not _users[name]:
            os.environ.pop(name, None)


class Assembly:
    """The instances of a run's plugins, by name or alias: one per (plugin, config).

    They are created with the assembly; strategies on first use.

    Raises:
        ConfigError: two plugins have the same name.
        PluginError: a plugin cannot be used here, or cannot be created.
    """

    def __init__(self, run: Run, trackers: Sequence[GeneralTracker]) -> None:
        _verify(run.stack)
        self._run = run
        self._manager = PluginManager()
        self._hooks: dict[str, Hooks] = {}
        self.plugins: dict[str, object] = {}
        self.configs: dict[str, object] = {}
        self.cards: dict[str, Card] = {}
        self._origins: dict[str, str] = {}
        """Name of a card -> its distribution and version."""
        stack = run.stack
        self._lower = ("base", stack.device.name, stack.precision.name)
        self._manager.add_plugin(Base(run), name="base", slot="base")
        for chosen in (stack.device, stack.precision, *stack.extensions, *stack.trackers):
            self._make(chosen, chosen.name)
        for tracker in trackers:  # of the user's own, which no package provides
            self._add(tracker, name=tracker.name, slot="tracker", origin="log_with")
        self._common = tuple(self._manager.layers)

    def hooks_of(self, alias: str) -> Hooks:
        """Return the hooks of the stack with strategy `alias`, whose plugin is created on first use."""
        if alias not in self._hooks:
            self._make(self._run.stack.strategies.get(alias) or _late_strategy(self._run, alias), alias)
            self._manager.check_package_hooks(self._origins)
            self._hooks[alias] = self._manager.hooks_of([*self._common, alias])
        return self._hooks[alias]

    def _make(self, chosen: Chosen, alias: str) -> None:
        """Create a plugin's instance, and add the hooks that its package declares."""
        card, record = chosen.card, chosen.record
        self._origins[card.name] = record.origin
        if card.hookspecs is not None:
            self._manager.add_package_specs(card.name, load(record, card.hookspecs))
        config = self._run.resolved.plugin_config(record, alias)
        self.configs[alias], self.cards[alias] = config, card
        plugin = record.implementation(config, self._run)
        plugin.below = self._manager.hooks_of(self._lower, LAYERS[record.slot])
        self._add(plugin, name=alias, slot=record.slot, origin=record.origin)

    def _add(self, plugin: object, *, name: str, slot: str, origin: str) -> None:
        self._manager.add_plugin(plugin, name=name, slot=slot, origin=origin)
        self.plugins[name] = plugin


def _verify(stack: Stack) -> None:
    for chosen in stack.members():
        if chosen.card.verify is not None and (reason := verify(chosen.record)):
            raise PluginError(
                f"{chosen.record.slot} {chosen.name} ({chosen.why}) cannot be used here: {reason}\n"
                f"`accel plugins doctor {chosen.name}` looks closer",
                plugin=chosen.name,
                distribution=chosen.record.origin,
            )


def _late_strategy(run: Run, alias: str) -> Chosen:
    record = discover().get(alias)
    if record is None or record.slot != "strategy" or record.status != "available":
        known = ", ".join(run.stack.strategies)
        raise ConfigError(
            f"prepare(strategy={quoted(alias)}): no such strategy; this run has {known}\n"
            "name it under strategies: in the config, or use an installed plugin's name (accel plugins)"
        )
    return Chosen(record, "asked for in prepare")


def check_refusals(run: Run) -> None:
    """Raise ConfigError if a plugin refuses the stack or the config."""
    reasons = run.hooks.refuse(run.config)
    if reasons:
        raise ConfigError(
            f"the stack {run.stack} refuses this config\n" + "\n".join(reasons), problems=reasons
        )


def check_capabilities(run: Run, hooks: Hooks, strategy: str) -> None:
    """Raise ConfigError if a plugin needs a capability that this device or strategy does not have."""
    able = hooks.capabilities(run.device)
    on_the_device = hooks.below_layer(LAYERS["strategy"]).capabilities(run.device)
    for chosen in run.stack.members():
        lacking = (chosen.card.needs & run.stack.device.card.offers) - able
        if lacking:
            by_strategy = lacking <= on_the_device
            culprit = f"strategy {strategy!r}" if by_strategy else str(run.device)
            raise ConfigError(
                f"{chosen.record.slot} {chosen.name} ({chosen.why}) needs {', '.join(sorted(lacking))},"
                f" which {culprit} cannot do\nchoose another {chosen.record.slot},"
                f" or another {'strategy' if by_strategy else 'device'}"
            )


def check_device(run: Run) -> None:
    """Raise ConfigError if a plugin or `rng_types` needs something that this device does not have."""
    check_capabilities(run, run.hooks, run.stack.default)
    for stream in run.config.rng_types:
        if stream != "generator" and stream not in (streams := run.hooks.random_streams()):
            known = ["generator", *sorted(streams)]
            origin = run.resolved.origins.get("rng_types", "default")
            raise ConfigError(
                f"rng_types: there is no random stream {quoted(stream)} ({origin}) on {run.device}"
                f"{did_you_mean(stream, known)}\nchoose among {', '.join(known)}"
            )
