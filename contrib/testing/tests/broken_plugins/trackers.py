"""Trackers that break one promise each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_core import hooks, implements


class Sound:
    below: Any

    def __init__(self, config, run):
        self.run = run
        self.path = Path(run.config.project.logging_dir, "log.txt")

    def write(self, values):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(repr(values))

    @implements(hooks.tracking_started)
    def tracking_started(self, project, config, options):
        self.write(config)

    @implements(hooks.log)
    def log(self, values, step, options):
        self.write(values)


class WritesOnEachRank(Sound):
    @implements(hooks.run_started)
    def run_started(self, run_id, config):
        self.write(run_id)


class WantsNumbers(Sound):
    @implements(hooks.tracking_started)
    def tracking_started(self, project, config, options):
        self.write({name: float(value) for name, value in config.items()})

    @implements(hooks.log)
    def log(self, values, step, options):
        self.write({name: float(value) for name, value in values.items()})


class ForgetsItsRun(Sound):
    def state_dict(self):
        return {"run": 1}

    def load_state_dict(self, state):
        self.run = state["id"]
