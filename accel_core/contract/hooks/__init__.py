"""The contract between core and plugins: every hook, in a file per role.

`heart` comes first: the hooks that a strategy or a precision implements before any others. `prepare`,
`device`, `launcher` and `observer` have the rest.

Each hook has a kind:

* `owner`: exactly one plugin answers, the topmost in layer order that implements the hook. Core resolves the
  owner once; the returned value, None included, never decides which plugin answers. To call the next
  implementation down, a plugin uses `self.below`: the owner hooks resolved for the layers under it. A method
  that only calls the same hook of `self.below` counts as not implemented.
* `everyone`: all plugins that implement the hook, bottom layer first. The spec says how answers become one:
  `merge` (two answers for one key are an error), `concatenate`, `enter` (contexts, bottom up) or `compose`
  (factories of contexts). Implementations that return None are skipped.
* `wrapper`: each plugin refines the first parameter after `unit`, bottom layer innermost, and returns it.

A package declares hooks of its own in a module that its card names as `hookspecs`. Other packages implement
these by name, `@implements("CARD.HOOK")`. If the declaring package is not in the run, the method is never
called; if it is, a hook that it does not have is an error. The package calls its hooks by
`run.hooks["CARD.HOOK"](...)`, with positional arguments.

Layers, bottom to top: base (core's defaults) < device < precision < strategy < extension, by slot. Trackers
implement observers only, extensions no owner hook.

Hooks and implementations take plain parameters: no `*`, no defaults, no `**kwargs`. An implementation may
leave out some of them; later versions only add more. Per-step hooks are bound once per unit, by `prepare`.
"""

from __future__ import annotations

from accel_core.contract.hooks.device import *  # noqa: F403
from accel_core.contract.hooks.heart import *  # noqa: F403
from accel_core.contract.hooks.launcher import *  # noqa: F403
from accel_core.contract.hooks.observer import *  # noqa: F403
from accel_core.contract.hooks.prepare import *  # noqa: F403
from accel_core.contract.spec import implements as implements
