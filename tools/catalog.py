"""Write the plugins of this repository into `accel_core/plugins/catalog.yaml`, for install hints.

`python tools/catalog.py` rewrites the generated part; `--check` only says whether it is fresh.
Reads each workspace member's pyproject and the cards its entry points name; imports no torch.
"""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import tomllib
import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "accel_core" / "plugins" / "catalog.yaml"
MARK = "# Plugins of this repository, for install hints. Written by tools/catalog.py; do not edit below.\n"
GROUP = "accel_core."


def members(root: Path = ROOT) -> list[Path]:
    """List the folders of the workspace's distributions, in the order of pyproject."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return [root / member for member in settings["tool"]["uv"]["workspace"]["members"]]


def rows(member: Path) -> list[dict[str, Any]]:
    """Describe each plugin that one distribution declares."""
    project = tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.path.insert(0, str(member / "src"))
    found = []
    for group, entries in project.get("entry-points", {}).items():
        if group.startswith(GROUP):
            for name, target in entries.items():
                row = {"name": name, "slot": group.removeprefix(GROUP), "distribution": project["name"]}
                row["folder"] = member.relative_to(ROOT).as_posix()
                card = _resolve(target)
                listed = {"also": list(card.also), "dimensions": list(card.dimensions)}
                found.append({**row, **{name: words for name, words in listed.items() if words}})
    return found


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def render(root: Path = ROOT) -> str:
    """Return the whole file: the hand-written part unchanged, and the generated part."""
    written = (
        (root / "accel_core" / "plugins" / "catalog.yaml").read_text(encoding="utf-8").partition(MARK)[0]
    )
    plugins = [row for member in members(root) for row in rows(member)]
    return written + MARK + yaml.safe_dump({"plugins": plugins}, sort_keys=False, width=110)


def main() -> int:
    """Write the file, or with --check compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if the file is stale; write nothing"
    )
    text = render()
    if parser.parse_args().check:
        fresh = text == TARGET.read_text(encoding="utf-8")
        print("catalog.yaml is fresh" if fresh else "catalog.yaml is stale: python tools/catalog.py")
        return 0 if fresh else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
