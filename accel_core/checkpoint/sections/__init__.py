"""The kinds of state of a run: one module for each, with `collect` and `plan`.

`collect(save)` adds this rank's state to a save. `plan(load)` compares the run with a checkpoint, notes what
does not fit, and adds the actions that put the state back; it changes nothing.

A save and a load walk `SECTIONS` in this order: optimizers and plugins need what `models` finds out about
each unit, and random streams are last because the others may draw from them.
"""

from __future__ import annotations

from accel_core.checkpoint.sections import models, objects, optimizers, plugins, random_streams

SECTIONS = (objects, models, optimizers, plugins, random_streams)
