"""Backends by the dozen, to see that listing and launching stay fast with many installed.

`python generated_backends.py FOLDER` writes twelve of 25 options each; PYTHONPATH=FOLDER installs them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from toy_distributions import card_source, write_distribution

SLOTS = ("device", "strategy", "tracker", "extension")
OPTIONS = (
    ('Literal["none", "some", "all"]', '"none"', 'choices=("none", "some", "all")'),
    ("int", "25", 'unit="MiB"'),
    ("bool", "False", ""),
    ("float", "0.5", ""),
    ("str | None", "None", ""),
)

CONFIG = """\
from __future__ import annotations

from typing import Literal

from attrs import frozen

from accel_core import option


@frozen(kw_only=True)
class Config:
    \"\"\"Options of a generated backend.\"\"\"

{options}
"""

PLUGIN = """\
from __future__ import annotations

import torch


class Plugin:
    def __init__(self, config: object, run: object) -> None:
        self.config = config
"""


def generate_backends(folder: Path, count: int = 12, options: int = 25) -> list[str]:
    """Write `count` backends of `options` options into `folder`; gives the plugins' names.

    Each has a card, a config class, and an implementation that imports torch, in modules of its own.
    """
    return [_generate(folder, number, options) for number in range(count)]


def _generate(folder: Path, number: int, options: int) -> str:
    name, slot = f"generated-{number}", SLOTS[number % len(SLOTS)]
    package = name.replace("-", "_")
    card = card_source(
        name,
        slot,
        summary=f"'Generated backend {number}.'",
        config=repr(f"accel_{package}.config:Config"),
        implementation=repr(f"accel_{package}.plugin:Plugin"),
        probe="lambda: None" if number % 2 else "lambda: 'no driver'",
    )
    write_distribution(
        folder,
        f"accel-{name}",
        entry_points={f"accel_core.{slot}": {name: f"accel_{package}.card:CARD"}},
        modules={
            f"accel_{package}": "",
            f"accel_{package}.card": card,
            f"accel_{package}.config": CONFIG.format(options="\n".join(map(_option, range(options)))),
            f"accel_{package}.plugin": PLUGIN,
        },
    )
    return name


def _option(number: int) -> str:
    type_, default, more = OPTIONS[number % len(OPTIONS)]
    arguments = ", ".join(filter(None, [default, f'help="Generated option {number}."', more]))
    return f"    option_{number}: {type_} = option({arguments})"


if __name__ == "__main__":
    print("\n".join(generate_backends(Path(sys.argv[1]))))
