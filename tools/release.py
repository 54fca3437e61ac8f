"""Compare a version with that of every package, of CITATION.cff and of the changelogs: `release.py 0.1.0`."""
# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def problems(version: str, root: Path = ROOT) -> Iterator[str]:
    """Yield each file that does not speak of this version."""
    modules = [root / "accel_core" / "_version.py", *sorted(root.glob("*/*/src/accel_*/__init__.py"))]
    for file in modules:
        found = VERSION.search(file.read_text(encoding="utf-8"))
        if found is None or found[1] != version:
            yield f"{file.relative_to(root)}: the version is {found and found[1]}, not {version}"
    for file in (root / "CHANGELOG.md", *sorted(root.glob("*/*/CHANGELOG.md"))):
        if f"\n## {version}" not in file.read_text(encoding="utf-8"):
            yield f"{file.relative_to(root)}: there is no section {version}"
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text(encoding="utf-8"):
        yield f"CITATION.cff: the version is not {version}"


def main() -> int:
    """Print the problems."""
    found = list(problems(sys.argv[1]))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
