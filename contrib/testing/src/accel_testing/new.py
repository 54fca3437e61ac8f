"""`accel plugins new`: a distribution with one plugin, rendered from `templates`."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Final

import click

from accel_core import PluginError, catalog_entry, check_name, discover

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.abc import Traversable

__all__ = ["new", "render"]

CORE: Final = "accel-core"
LONGEST: Final = 60
"""Letters of a name: paths in the package repeat it."""
RENDERED: Final = ("device", "strategy", "precision", "launcher", "extension", "tracker", "store", "command")
NEEDED_BY_TESTS: Final = {"device": ', "accel-ddp"'}
"""Requirements of a template's tests besides the conformance kit."""


@click.command()
@click.argument("name")
@click.option("--slot", type=click.Choice(RENDERED), required=True, help="What the plugin is for.")
@click.option("--into", default=".", show_default=True, help="Folder in which accel-NAME is made.")
def new(name: str, slot: Any, into: str) -> None:
    """Write a distribution, accel-NAME, with one plugin that passes the kit."""
    refuse_name(name, slot)
    target = Path(into, f"accel-{name}")
    if target.exists():
        raise PluginError(f"{target} is there already\nremove it, or name another folder: --into FOLDER")
    for path, text in render(name, slot).items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        print(file)
    print(f"pip install ./{target.name}, then: accel plugins; its README.md says how to go on")


def refuse_name(name: str, slot: Any) -> None:
    """Raise PluginError for a name that is wrong or taken."""
    if len(name) > LONGEST:
        raise PluginError(
            f"a name of {len(name)} letters is too long for a folder\ntake one of at most {LONGEST}",
            plugin="",
        )
    check_name(name)
    record, known = discover().get(name), catalog_entry(name)
    if record is not None or known is not None:
        owner = record.origin if record else known.distribution if known else ""
        raise PluginError(f"plugin {name!r} is provided by {owner}\ntake another name", plugin=name)
    if any(metadata.distributions(name=f"accel-{name}")):
        raise PluginError(
            f"accel-{name} is installed, and pip would replace it\ntake another name", plugin=name
        )


def render(name: str, slot: Any) -> dict[str, str]:
    """Return the new distribution's files: path in its folder -> text."""
    words = _words(name, slot)
    made = {"LICENSE": metadata.distribution(CORE).read_text("licenses/LICENSE") or ""}
    for part in ("common", slot):
        for template, text in _templates(files("accel_testing") / "templates" / part):
            path = template.replace("MODULE", words["module"]).replace("DEVICE", words["device"])
            made[path.replace("dot-", ".").removesuffix(".in")] = Template(text).substitute(words)
    return dict(sorted(made.items()))


def _words(name: str, slot: Any) -> Mapping[str, str]:
    from accel_core import API_VERSION, __version__

    major, minor = map(int, __version__.split(".")[:2])
    module = name.replace("-", "_")
    return {
        "name": name,
        "slot": slot,
        "runtime": ', "click>=8.1"' if slot == "command" else "",
        "testing": NEEDED_BY_TESTS.get(slot, ""),
        "distribution": f"accel-{name}",
        "module": f"accel_{module}",
        "Class": "".join(map(str.capitalize, name.split("-"))),
        "CONSTANT": module.upper(),
        "device": re.sub(r"[^a-z_]", "", module),  # torch's types have no digits
        "requirement": f"{CORE}>={major}.{minor},<{major}.{minor + 2}",
        "api_version": API_VERSION,
    }


def _templates(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".in"):
            yield prefix + entry.name, entry.read_text(encoding="utf-8")
