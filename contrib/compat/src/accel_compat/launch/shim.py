"""A folder on PYTHONPATH and PATH that makes `accelerate` ours for a process."""

from __future__ import annotations

import sys
from pathlib import Path

from accel_compat.import_hook import METADATA, NAME, VERSION

MODULE = (
    "from accel_compat.import_hook import replace_module; import sys; replace_module(sys.modules[__name__])\n"
)
SCRIPT = """\
#!{python}
from accel_compat.launch.commands import accelerate

accelerate({words})
"""
SCRIPTS = {"accelerate": "", **{f"accelerate-{each}": repr(each) for each in ("config", "launch")}}
SCRIPTS |= {f"accelerate-{each}": repr(each) for each in ("estimate-memory", "merge-weights")}
"""Each script of Accelerate -> the word that it stands for."""


def write_shim(folder: Path) -> None:
    """Write the package `accelerate`, its metadata, and its scripts into `bin`."""
    package, info, programs = folder / NAME, folder / f"{NAME}-{VERSION}.dist-info", folder / "bin"
    for each in (package, info, programs):
        each.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(MODULE)
    (info / "METADATA").write_text(METADATA)
    (info / "top_level.txt").write_text(f"{NAME}\n")
    (info / "RECORD").write_text(f"{NAME}/__init__.py,,\n")
    for name, words in SCRIPTS.items():
        script = programs / name
        script.write_text(SCRIPT.format(python=sys.executable, words=words))
        script.chmod(0o755)
