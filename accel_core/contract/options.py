"""Declaration of the options of a config class."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import islice
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import attrs
from attrs import NOTHING, Attribute, frozen

Path = tuple[str, ...]
"""An option's address, such as ("launch", "nodes")."""

F = TypeVar("F", bound=Callable[..., None])

_KEY: Final = "accel_core.option"


@frozen(kw_only=True, eq=False, repr=False)
class Option:
    """The facts of an option, beyond name, type and default."""

    help: str = ""
    unit: str | None = None
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    only_with: str = ""
    """Name of the option of the same class without which this one has no effect.

    A run notes an option that is set without it.
    """
    secret: bool = False
    """Never printed or stored; so is an option that is called so (`is_secret`)."""
    python_only: bool = False
    """Cannot be written as text: left out of YAML, environment, flags and schema."""
    refused: bool = False
    """A value that switches the option on is refused with the help."""

    @property
    def sentence(self) -> str:
        """The help, with the unit unless the help names it."""
        if self.refused:
            return f"Refused: {self.help}"
        if self.unit is None or self.unit in self.help.lower():
            return self.help
        return f"{self.help} Unit: {self.unit}."

    def objection(self, value: Any) -> str | None:
        """Return the reason to refuse a value of the right type, if any."""
        if value is None:
            return None
        if self.refused and value:  # False and 0 are how others say "off"
            return self.help
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if self.choices and item not in self.choices:
                return f"expected one of {', '.join(map(_word, self.choices))}, got {_word(item)}"
        if self.minimum is not None and isinstance(value, (int, float)) and not value >= self.minimum:
            return f"must be at least {self.minimum:g}, got {value!r}"
        return None


def option(
    default: Any = NOTHING,
    *,
    factory: Callable[[], Any] | None = None,
    help: str,
    unit: str | None = None,
    choices: Sequence[Any] | None = None,
    minimum: float | None = None,
    python_only: bool = False,
    secret: bool = False,
    only_with: str = "",
    refused: bool = False,
    converter: Callable[[Any], Any] | None = None,
) -> Any:
    """Declare a field of a config class that users may set.

    As in `bucket_cap_mb: int = option(25, help="Size of a bucket.", unit="MiB")`.

    Args:
        default: its value if it is not given; may not depend on the environment. Left out: the
            option is required.
        factory: makes the default, for mutable ones.
        help: one sentence, shown by `accel config init`, the JSON schema and the reference.
        unit: of a number: "s", "MiB", ...
        choices: the only values allowed.
        minimum: the smallest number allowed.
        python_only: for what no YAML can hold, such as a callable.
        secret: its value is masked wherever settings are printed or stored. An option called token,
            password, secret, api_key and the like is masked without it.
        only_with: another option of the class, without which this one does nothing: a run says so.
        refused: any value that switches it on is an error, which `help` words: why, and what to do instead.
        converter: applied to what Python gives, as in attrs.
    """
    about = Option(
        help=help,
        unit=unit,
        choices=tuple(choices or ()),
        minimum=minimum,
        python_only=python_only,
        secret=secret,
        only_with=only_with,
        refused=refused,
    )
    given = {"factory": factory} if factory is not None else {"default": default}
    # attrs compiles a line for each validator, so options that take any value have none.
    validator = _validate if about.choices or minimum is not None or refused else None
    return attrs.field(
        **given, metadata={_KEY: about}, validator=validator, converter=converter, repr=not secret
    )


MASK: Final = "***"
_SECRETS: Final = frozenset("key token apikey secret password passwd passphrase credentials".split())  # noqa: SIM905
_OF_A_DOOR: Final = frozenset("api access auth bearer private secret hub hf refresh signing".split())  # noqa: SIM905
_LOGIN: Final = re.compile(r"(?<=://)[^/@\s]+(?=@)")
"""The user, and mostly a password or token, in an address."""


def is_secret(name: str) -> bool:
    """Tell if an option of this name is a secret: api_key, password; not pad_token."""
    *before, last = re.split(r"[^a-z]+", name.lower())
    return last in _SECRETS and (last not in ("key", "token") or not before or before[-1] in _OF_A_DOOR)


def may_be_secret(variable: str) -> bool:
    """Tell if a variable of the environment may be a secret."""
    return not _SECRETS.isdisjoint(re.split(r"[^a-z]+", variable.lower()))


def masked(value: Any, secret: bool = False) -> Any:
    """Mask secrets at any depth of mappings and lists, and logins in addresses."""
    if secret and value is not None and not (isinstance(value, (str, tuple)) and not value):
        return MASK
    if type(value) is str:
        return _LOGIN.sub(MASK, value)
    if isinstance(value, Mapping):
        return {key: masked(each, is_secret(str(key))) for key, each in value.items()}
    return type(value)(map(masked, value)) if type(value) in (list, tuple) else value


def describe(attribute: Attribute[Any]) -> Option:
    """Return the facts that `option` stored in a field; a plain field has none."""
    found = attribute.metadata.get(_KEY)
    return found if isinstance(found, Option) else Option()


def _word(choice: Any) -> str:
    return repr(choice.value if isinstance(choice, Enum) else choice)


def default_of(attribute: Attribute[Any], instance: object) -> Any:
    """Return a field's default for `instance`; NOTHING if it is required."""
    default: Any = attribute.default
    if default is NOTHING or not hasattr(default, "takes_self"):
        return default
    return default.factory(instance) if default.takes_self else default.factory()


def changed(instance: Any) -> dict[str, Any]:
    """Return the options of a config object that differ from their defaults."""
    held = {alias: (a, getattr(instance, a.name)) for alias, (a, _) in options_of(type(instance)).items()}
    return {alias: value for alias, (a, value) in held.items() if value != default_of(a, instance)}


def remember_given(init: F) -> F:
    """Wrap an `__init__` so that `self._given` holds the names of its arguments."""

    @functools.wraps(init)
    def remembering(self: object, *args: Any, **kwargs: Any) -> None:
        names = islice(inspect.signature(init).parameters, 1, len(args) + 1) if args else ()
        object.__setattr__(self, "_given", frozenset((*names, *kwargs)))
        init(self, *args, **kwargs)

    return cast("F", remembering)


class Remembering:
    """Base of config classes whose objects remember the arguments they were given."""

    __slots__ = ("_given",)

    def __init_subclass__(cls) -> None:
        if "__init__" in vars(cls):  # attrs makes a class with slots a second time, then with its __init__
            cls.__init__ = remember_given(cls.__init__)  # type: ignore[method-assign]


def said(instance: Any) -> dict[str, Any]:
    """Return a config object's options that were given or are not the default.

    None says nothing where it is the default.
    """
    given: frozenset[str] = getattr(instance, "_given", frozenset())  # a copy does not remember
    named = {alias: getattr(instance, a.name) for alias, (a, _) in options_of(type(instance)).items()}
    return {alias: named[alias] for alias in given & named.keys() if named[alias] is not None} | changed(
        instance
    )


def _validate(instance: object, attribute: Attribute[Any], value: Any) -> None:
    objection = describe(attribute).objection(value)
    if objection:
        raise ValueError(f"{type(instance).__name__}.{attribute.name}: {objection}")


def options_of(cls: type) -> Mapping[str, tuple[Attribute[Any], Any]]:
    """Name -> (attrs field, resolved type) of a config class; Any for python_only."""
    return _options_of(cls)


@cache
def _options_of(cls: Any) -> Mapping[str, tuple[Attribute[Any], Any]]:
    found = {}
    for attribute in attrs.fields(cls):
        kind = attribute.type
        if describe(attribute).python_only:
            kind = Any  # its annotation may name what only type checkers import
        elif isinstance(kind, str):
            home = next(c for c in cls.__mro__ if attribute.name in vars(c).get("__annotations__", ()))
            named = types.SimpleNamespace(__annotations__={"it": kind})
            kind = get_type_hints(named, vars(sys.modules[home.__module__]))["it"]
        if attribute.init:
            found[attribute.alias] = (attribute, kind)
    return found


def section_class(kind: Any) -> type | None:
    """Return the attrs class of an option that is a section, `X` or `X | None`."""
    candidates = [kind, *(get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ())]
    return next((c for c in candidates if isinstance(c, type) and attrs.has(c)), None)
