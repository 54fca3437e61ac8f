"""Writes distributions as an installer would leave them: importable modules beside real metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    folder: Path,
    name: str,
    *,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    version: str = "1.0",
) -> Path:
    """A distribution in `folder`, which works once it is on the path. Gives its dist-info folder.

    entry_points: group -> entry name -> target. modules: dotted name -> source; a module that others
    lie in becomes a package.
    """
    for module, source in modules.items():
        path = folder.joinpath(*module.split("."))
        is_package = any(other.startswith(f"{module}.") for other in modules)
        file = path / "__init__.py" if is_package else path.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n\n# A toy\n\nName: no\n"
    )
    (info / "INSTALLER").write_text("toys\n")
    (info / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{entry} = {target}\n" for entry, target in entries.items())
            for group, entries in entry_points.items()
        )
    )
    return info


def card_source(name: str, slot: str = "strategy", **arguments: str) -> str:
    """A card module. The arguments are source: `probe="lambda: 'no driver'"`."""
    given = {"summary": "'A toy.'", "api_version": "'1.0'", **arguments}
    text = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"from accel_core import Card\nCARD = Card(name={name!r}, slot={slot!r}, {text})\n"
