"""Two extensions that take part in one run: each counts steps, and saves the count."""

from __future__ import annotations

from attrs import frozen

from accel_core import Entry, hooks, implements, option


@frozen(kw_only=True)
class FirstConfig:
    """Options of the first."""

    every: int = option(1, help="Steps of which one is counted.", minimum=1)


@frozen(kw_only=True)
class SecondConfig:
    """Options of the second."""

    every: int = option(1, help="Steps of which one is counted.", minimum=1)


class First:
    def __init__(self, config, run):
        self.every, self.steps = config.every, 0

    @implements(hooks.after_step)
    def after_step(self, unit, optimizer, applied):
        self.steps += 1

    @implements(hooks.save_state)
    def save_state(self, unit):
        return {type(self).__name__.lower(): Entry(value=self.steps)}

    @implements(hooks.load_state)
    def load_state(self, unit, entries):
        self.steps = sum(entry.value for entry in entries.values())


class Second(First):
    """Asks for its steps by itself."""
