"""The kinds of state of a run: one module for each, with `collect` and `plan`.

`collect(save)` adds this rank's state to a save. `plan(load)` compares the run with a checkpoint, notes
differences, and adds the actions that restore the state. `plan` changes nothing.

A save and a load walk `SECTIONS` in this order: optimizers and plugins read the description of each unit that
`models` adds, and random streams are last because other sections may draw from them.
"""

from __future__ import annotations

from accel_core.checkpoint.sections import models, objects, optimizers, plugins, random_streams

SECTIONS = (objects, models, optimizers, plugins, random_streams)
