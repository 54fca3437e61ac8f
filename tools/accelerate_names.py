"""Write docs/accelerate-names.md: which names of Accelerate 1.15 accel-compat serves.

`python tools/accelerate_names.py` in an environment that has accel-compat; a test tells when it is due.
"""
# ruff: noqa: INP001 - a script

from __future__ import annotations

from collections import defaultdict
from importlib import import_module
from pathlib import Path

import accel_compat
from accel_compat.unsupported import PACKAGES, inventory, why

PAGE = Path(__file__).parents[1] / "docs" / "accelerate-names.md"
HEAD = """\
# The names of Accelerate 1.15

Written by `tools/accelerate_names.py`; do not edit. Each name can be imported from where Accelerate has it.
Those listed as not served raise `NotServedError` when they are called.
"""


def refused(module: str, name: str) -> bool:
    """Return True if a name only says why it is not served."""
    try:
        found = getattr(import_module(module), name)
    except ImportError:
        return True
    code = getattr(found, "__code__", None)
    return type(found).__name__ == "_Refusing" or (code is not None and code.co_name == "refuse")


def page() -> str:
    """Return the text of the page."""
    accel_compat.install()
    lines = [HEAD]
    for module, names in inventory().items():
        served, needing, reasons = [], [], defaultdict(list)
        for name in names:
            if name in PACKAGES:
                needing.append(f"`{name}` ({PACKAGES[name]})")
            else:
                (reasons[why(module, name)] if refused(module, name) else served).append(f"`{name}`")
        lines.append(f"## {module}\n")
        if served:
            lines.append(f"Served: {', '.join(served)}.\n")
        if needing:
            lines.append(f"Works where its package is installed: {', '.join(needing)}.\n")
        for reason, those in sorted(reasons.items()):
            lines.append(f"Not served ({reason}): {', '.join(those)}.\n")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
