"""The command line of `accelerate launch`, and which of its flags were given."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from copy import copy
from typing import Any, Final, NoReturn

from accel_compat.settings import WORDS, Setting, settings

_KINDS: Final = {"int": int, "float": float}
_SPELLINGS: Final = {"module": ("-m", "--module"), "quiet": ("--quiet", "-q"), "tee": ("-t", "--tee")}
"""Flag -> its spellings, where one is short."""


class _Given(argparse.Action):
    """Stores a value and notes the flag as given, as a file wins over defaults."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}


class _Underscored(argparse.HelpFormatter):
    """Shows each flag in one spelling."""

    def add_argument(self, action: argparse.Action) -> None:
        shown = copy(action)
        shown.option_strings = [each for each in action.option_strings if "-" not in each[2:]]
        super().add_argument(shown)


class _Parser(argparse.ArgumentParser):
    """Names the flag that was meant instead of listing all flags."""

    def error(self, message: str) -> NoReturn:
        words = message.split() if message.startswith("unrecognized") else []
        unknown = [word for word in words if word.startswith("--")]
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, 1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near and near[0] not in unknown else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n`{self.prog} --help` lists the flags\n")


def launch_parser() -> argparse.ArgumentParser:
    """Make the parser of `accelerate launch`."""
    parser = _Parser(
        "accel compat launch",
        description="Start a script written for Accelerate, by accelerate launch's own flags, spelled with"
        " underscores or with hyphens (`--num-processes=2`).",
        allow_abbrev=False,
        formatter_class=_Underscored,
    )
    for setting in settings().values():
        _add_flag(parser, setting)
    off = {"dest": "tpu_use_cluster", "nargs": 0, "const": False}
    parser.add_argument("--no_tpu_cluster", "--no-tpu-cluster", action=_Given, **off)  # type: ignore[arg-type]
    parser.add_argument("training_script", action=_Given)
    parser.add_argument("training_script_args", action=_Given, nargs=argparse.REMAINDER)
    return parser


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    name = setting.name.replace("tpu_use_cluster", "tpu_cluster")
    spellings = dict.fromkeys((*_SPELLINGS.get(name, ()), f"--{name}", f"--{name.replace('_', '-')}"))
    about = f"Has no effect: {setting.reason}" if setting.reason else setting.help
    options: dict[str, Any] = {"metavar": "VALUE", "type": _KINDS.get(setting.kind, str)}
    if setting.kind == "switch":
        options = {"nargs": 0, "const": True}
    elif setting.name in WORDS:
        words = WORDS[setting.name]
        options |= {"type": str.upper if words[0].isupper() else str.lower, "choices": words}
    parser.add_argument(
        *spellings,
        dest=setting.name,
        action=_Given,
        default=setting.default,
        help=about.replace("%", "%%"),
        **options,
    )


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """List the flags that the command line, or a program afterwards, has set."""
    noted: Iterable[str] = getattr(arguments, "nondefault", ())
    usual = {name: setting.default for name, setting in settings().items()}
    return {
        name: value
        for name, value in vars(arguments).items()
        if name != "nondefault" and (name in noted or value not in (None, False, usual.get(name)))
    }
