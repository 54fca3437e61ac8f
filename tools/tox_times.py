"""Write the times of tox's environments into docs/test-times.md.

`python tools/tox_times.py LOG...` reads the closing lines of logs, such as `core: OK (61.2=...`, updates
the rows of these environments, and keeps the others. Imports no torch.
"""
# ruff: noqa: INP001  # a script

from __future__ import annotations

import re
import sys
from configparser import ConfigParser
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "test-times.md"
HEAD = "| environment | runs in | beside core | minutes | tests |\n|---|---|---|---|---|\n"
TABLE = re.compile(re.escape(HEAD) + r"((?:\|.*\n)*)")
CLOSING = re.compile(r"^  ([\w-]+): OK \(([\d.]+)", re.MULTILINE)
BRACES = re.compile(r"\{([^{}]*)\}")


def listed(text: str) -> list[str]:
    """List the environments of a setting: one or several on a line, with commas between."""
    names = re.findall(r"(?:\{[^{}]*\}|[\w-])+", text)
    return [one for name in names for one in expanded(name)]


def expanded(name: str) -> list[str]:
    """List the names that `py{310,312}` stands for."""
    parts = BRACES.split(name)
    return ["".join(each) for each in product(*(part.split(",") for part in parts))]


def read(root: Path = ROOT) -> ConfigParser:
    """Read tox.ini."""
    settings = ConfigParser(interpolation=None, inline_comment_prefixes=("#",))
    settings.read(root / "tox.ini", encoding="utf-8")
    return settings


def environments(root: Path = ROOT) -> dict[str, tuple[bool, str]]:
    """Map each environment of tox.ini to (is run by plain `tox`, description)."""
    settings = read(root)
    default = listed(settings["tox"]["env_list"])
    full = listed(settings["tox"]["labels"].partition("full = ")[2])
    about = {name: f"the tests of accel-{name}, beside accel-core" for name in default}
    about |= settings["about"]
    for section in settings.sections():
        if section.startswith("testenv:") and "description" in settings[section]:
            names = expanded(section.partition(":")[2])
            about |= dict.fromkeys(names, settings[section]["description"])
    found = {name: (name in default, about[name]) for name in [*default, *full]}
    return dict(sorted(found.items(), key=lambda item: (not item[1][0], item[0])))


def holdings(root: Path = ROOT) -> dict[str, str]:
    """Map each environment to the packages of ours that it holds beside core and the kit."""
    rows = dict(read(root)["installs"])
    return {
        name: _holding(name, _resolved(rows.get(name, f"accel-{name}"), rows)) for name in environments(root)
    }


def _resolved(words: str, rows: dict[str, str]) -> str:
    return re.sub(r"\{\[installs\]([\w-]+)\}", lambda found: _resolved(rows[found[1]], rows), words)


def _holding(name: str, words: str) -> str:
    if name.startswith("py3"):
        return "nothing, not even torch"
    if "all" in words.split():
        return "all packages"
    ours = dict.fromkeys(re.findall(r"\baccel-([a-z-]+)", words))
    return ", ".join(package for package in ours if package != "core") or "nothing"


def written(text: str) -> dict[str, str]:
    """Read the minutes of each environment from the page."""
    table = TABLE.search(text)
    rows = table[1].splitlines() if table else []
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {row[0].strip("`"): row[-2] for row in cells}


def render(minutes: dict[str, str]) -> str:
    """Write the table, a row for each environment."""
    holds = holdings()
    cells = [
        (f"`{name}`", "`tox`" if is_default else "`tox -m full`", holds[name], minutes.get(name, "-"), about)
        for name, (is_default, about) in environments().items()
    ]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main() -> None:
    """Update the page."""
    text = PAGE.read_text(encoding="utf-8")
    minutes = written(text)
    for log in sys.argv[1:]:
        found = CLOSING.findall(Path(log).read_text(encoding="utf-8"))
        minutes |= {name: f"{float(seconds) / 60:.1f}" for name, seconds in found}
    PAGE.write_text(TABLE.sub(lambda _: render(minutes), text), encoding="utf-8")


if __name__ == "__main__":
    main()
