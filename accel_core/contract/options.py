"""Declaration of the options of a config class."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from functools import cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import attrs
from attrs import NOTHING, Attribute, evolve, frozen

from accel_core.contract.arguments import quoted

Path = tuple[str, ...]
"""An option's address, such as ("launch", "nodes")."""

_KEY: Final = "accel_core.option"


@frozen(kw_only=True, eq=False, repr=False)
class Option:
    """An option of a config class: the arguments of `option`, with the option's name, type and default."""

    help: str = ""
    unit: str | None = None
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    only_with: str = ""
    """Name of the option of the same class without which this one has no effect.

    A run notes an option that is set without it.
    """
    secret: bool = False
    """Never printed or stored. Also True for options whose names say so (`is_secret`)."""
    python_only: bool = False
    """Cannot be written as text: left out of YAML, environment, flags and schema."""
    refused: bool = False
    """A value that switches the option on is refused; `help` is the reason."""

    dimension: str = ""
    """Python only: the option is another spelling of this dimension of section `parallelism`."""

    name: str = ""
    """Name as users write it."""
    attribute: str = ""
    """Attribute of the config object that holds its value."""
    kind: Any = Any
    """Type of the value; Any if only Python can give it."""
    section: type | None = None
    """The class of a section within the section, `X` or `X | None`."""
    default: Any = None
    """Default as in attrs: maybe a Factory; NOTHING if the option is required."""
    converter: Any = None
    """Applied to values given in Python; None: values stay as they are."""

    @property
    def sentence(self) -> str:
        """The help, with the unit unless the help names it."""
        if self.refused:
            return f"Refused: {self.help}"
        if self.unit is None or self.unit in self.help.lower():
            return self.help
        return f"{self.help} Unit: {self.unit}."

    def default_for(self, config: object) -> Any:
        """Return the default of a config object; NOTHING if the option is required."""
        default = self.default
        if not hasattr(default, "takes_self"):
            return default
        return default.factory(config) if default.takes_self else default.factory()

    def objection(self, value: Any) -> str | None:
        """Return the reason to refuse a value of the right type, if any."""
        if value is None:
            return None
        if self.refused and value:  # False and 0 mean "off", which is allowed
            return self.help
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if self.choices and item not in self.choices:
                return f"expected one of {', '.join(map(_word, self.choices))}, got {_word(item)}"
        number = value.total_seconds() if isinstance(value, timedelta) else value
        if self.minimum is not None and isinstance(number, (int, float)) and not number >= self.minimum:
            return f"must be at least {self.minimum:g}, got {number!r}"
        return None


def option(
    default: Any = NOTHING,
    *,
    factory: Callable[[], Any] | None = None,
    help: str,
    unit: str | None = None,
    choices: Sequence[Any] = (),
    minimum: float | None = None,
    python_only: bool = False,
    secret: bool = False,
    only_with: str = "",
    refused: bool = False,
    dimension: str = "",
    converter: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a field of a config class that users may set.

    For example `bucket_cap_mb: int = option(25, help="Size of a bucket.", unit="MiB")`.

    Args:
        default: the value if the user gives none; may not depend on the environment. Left out: the option is
            required.
        factory: makes the default, for mutable defaults.
        help: one sentence, shown by `accel config init`, the JSON schema and the reference.
        unit: unit of a number: "s", "MiB", ...
        choices: the only values allowed.
        minimum: the smallest number allowed.
        python_only: True for values that YAML cannot hold, such as a callable.
        secret: the value is masked in all settings that are printed or stored. An option called token,
            password, secret, api_key and the like is masked without it.
        only_with: another option of the class, without which this option has no effect: a run says so.
        dimension: the option is another spelling of this dimension of section `parallelism`, for arguments
            that users know from elsewhere. Files, variables and flags write the section.
        refused: any value that switches the option on is an error; `help` gives the reason and the remedy.
        converter: applied to values given in Python, as in attrs.
    """
    about = Option(
        help=help,
        unit=unit,
        choices=tuple(choices),
        minimum=minimum,
        python_only=python_only,
        secret=secret,
        only_with=only_with,
        refused=refused,
        dimension=dimension,
    )
    given = {"factory": factory} if factory is not None else {"default": default}
    # attrs compiles a line for each validator, so options that take any value have none.
    validator = _validate if about.choices or minimum is not None or refused else None
    return attrs.field(
        **given, metadata={_KEY: about}, validator=validator, converter=converter, repr=not secret
    )


def _validate(instance: object, attribute: Attribute[Any], value: Any) -> None:
    objection = attribute.metadata[_KEY].objection(value)
    if objection:
        raise ValueError(f"{type(instance).__name__}.{attribute.name}: {objection}")


def _word(choice: Any) -> str:
    return quoted(choice.value if isinstance(choice, Enum) else choice)


def options_of(cls: type) -> Mapping[str, Option]:
    """Return the options of a config class by name."""
    return _options_of(cls)


@cache
def _options_of(cls: Any) -> Mapping[str, Option]:
    return {a.alias: _option(cls, a) for a in attrs.fields(cls) if a.init}


def _option(cls: type, attribute: Attribute[Any]) -> Option:
    about: Option = attribute.metadata.get(_KEY, Option())
    kind: Any = attribute.type
    if about.python_only:
        kind = Any  # its annotation may name types that only type checkers import
    elif isinstance(kind, str):
        home = next(c for c in cls.__mro__ if attribute.name in vars(c).get("__annotations__", ()))
        named = types.SimpleNamespace(__annotations__={"it": kind})
        kind = get_type_hints(named, vars(sys.modules[home.__module__]))["it"]
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return evolve(
        about,
        name=attribute.alias or "",
        attribute=attribute.name,
        kind=kind,
        section=next((it for it in members if isinstance(it, type) and attrs.has(it)), None),
        default=attribute.default,
        converter=attribute.converter,
        secret=about.secret or is_secret(attribute.alias or ""),
    )


def changed(config: object) -> dict[str, Any]:
    """Return the options of a config object that differ from their defaults."""
    values = [(it, getattr(config, it.attribute)) for it in options_of(type(config)).values()]
    return {it.name: value for it, value in values if value != it.default_for(config)}


# -- secrets -----------------------------------------------------------------------------------------

MASK: Final = "***"
_WORDS: Final = "apikey|secret|password|passwd|passphrase|credentials"
_KEY_PREFIXES: Final = "api|access|auth|bearer|private|secret|hub|hf|refresh|signing"
_SECRET: Final = re.compile(
    rf"(.*[^a-z])?({_WORDS})|((.*[^a-z])?({_KEY_PREFIXES})[^a-z]+)?(key|token)", re.IGNORECASE
)
_MAY_BE_SECRET: Final = re.compile(rf"(^|[^a-z])({_WORDS}|key|token)($|[^a-z])", re.IGNORECASE)
_LOGIN: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The user, and often a password or token, in an address."""


def is_secret(name: str) -> bool:
    """Return whether an option of this name is a secret: api_key, password; not pad_token."""
    return _SECRET.fullmatch(name) is not None


def may_be_secret(variable: str) -> bool:
    """Return whether an environment variable of this name may be a secret."""
    return _MAY_BE_SECRET.search(variable) is not None


def masked(value: Any, secret: bool = False) -> Any:
    """Mask secrets at any depth of mappings and lists, and logins in addresses."""
    if secret and value not in (None, "", ()):
        return MASK
    if type(value) is str:
        return _LOGIN.sub(MASK, value)
    if isinstance(value, Mapping):
        return {key: masked(each, is_secret(str(key))) for key, each in value.items()}
    return type(value)(map(masked, value)) if type(value) in (list, tuple) else value
