"""Cards, their discovery from package metadata, and the loading of what they name.

Discovery imports cards only (no torch, no vendor library) and never raises: each entry point in a
group `accel_core.<slot>` becomes a `Record`, whatever is wrong with it. What it cannot survive is a
card module that crashes in native code; the stack that is printed then names the module.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from typing import Any, Final, Literal, get_args

from attrs import Attribute, evolve, field, frozen

from accel_core.errors import PluginError
from accel_core.patience import HungError, Patience, surviving

__all__ = [
    "CAPABILITIES",
    "SLOTS",
    "Card",
    "Discovery",
    "Record",
    "discover",
    "implementation",
    "load",
    "offering",
    "plugin_status",
]

Slot = Literal["device", "precision", "launcher", "strategy", "tracker", "extension", "command"]
SLOTS: Final[tuple[Slot, ...]] = get_args(Slot)
GROUP: Final = "accel_core."
CORE: Final = "accel-core"
BLOCK_VARIABLE: Final = "ACCEL_PLUGINS_BLOCK"

CAPABILITIES: Final[Mapping[str, str]] = {
    "bf16": "trains under autocast to bfloat16",
    "fp16": "trains under autocast to float16 with a loss scaler",
    "float64": "holds and computes float64 tensors",
    "memory_stats": "reports the bytes it has allocated",
    "rng": "saves and restores its random generators",
    "process_per_device": "several processes, each with a device of its own, form a world",
    "collectives.torch": "torch.distributed process groups carry its tensors",
    "collectives.own": "collectives of its own library carry its tensors between processes",
    "no_sync": "leaves out gradient communication inside an accumulation window",
    "local_sgd": "ranks may step by themselves, and average their weights now and then",
    "join": "ranks may run out of batches at different times",
    "dtensors": "trains, clips and saves parameters that other plugins have made DTensors",
    "several_optimizers": "a model may have several optimizers",
    "whole_weights": "each rank holds whole parameters",
}
"""The closed vocabulary of `offers` and `needs`: word -> what a plugin that offers it promises."""

Status = Literal["available", "unavailable", "broken", "blocked", "conflict", "incompatible"]


def _words(value: Iterable[str]) -> frozenset[str]:
    return frozenset({value} if isinstance(value, str) else value)


def _name(card: Card, attribute: Attribute[str], value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", value):
        raise PluginError(
            f"plugin name {value!r} is not lower-case words joined by single hyphens\ngive it such a name",
            plugin=value,
        )


def _version(card: Card, attribute: Attribute[str], value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"\d+\.\d+", value):
        raise PluginError(
            f"{card.name}: api_version {value!r} is not 'major.minor'\nwrite it so: '1.0'", plugin=card.name
        )


# A card for a newer API may use words that do not exist here yet. It must become `incompatible`,
# which says what to upgrade, and not `broken`: so its words are not looked at.


def _slot(card: Card, attribute: Attribute[str], value: str) -> None:
    if value not in SLOTS and not incompatibility(card.api_version):
        about = f"{card.name}: unknown slot {value!r}{near(value, SLOTS)}"
        raise PluginError(f"{about}\ntake one of {', '.join(SLOTS)}", plugin=card.name)


def _capabilities(card: Card, attribute: Attribute[frozenset[str]], value: frozenset[str]) -> None:
    unknown = sorted(value - CAPABILITIES.keys())
    if unknown and not incompatibility(card.api_version):
        hint = near(unknown[0], CAPABILITIES)
        raise PluginError(
            f"{card.name}: unknown capability {unknown[0]!r} in {attribute.name}{hint}\n"
            f"take words of {', '.join(CAPABILITIES)}",
            plugin=card.name,
        )


@frozen(kw_only=True)
class Card:
    """What a plugin says of itself without importing torch or its vendor's library.

    Paths are dotted: "package.module:Name". An entry point of group `accel_core.<slot>`, named like
    the card, points at it.
    """

    name: str = field(validator=_name)
    slot: Slot = field(validator=_slot)
    summary: str
    """One sentence; the help line of a command."""
    api_version: str = field(validator=_version)
    """The contract this was written for, "major.minor" of `hookspecs.API_VERSION`."""
    priority: int | None = None
    """For `auto`: native 0, first-party 100. None: only when named."""
    shadows: tuple[str, ...] = ()
    """Plugins of the same slot that `auto` must not take when this one is usable."""
    distributed_type: str | None = None
    """The value of `accelerator.distributed_type`; the strategy's wins over the device's, unless it is
    MULTI_DEVICE, which the device's completes."""
    offers: frozenset[str] = field(default=frozenset(), converter=_words, validator=_capabilities)
    needs: frozenset[str] = field(default=frozenset(), converter=_words, validator=_capabilities)
    torch_device: str | None = None
    """Device slot: torch's name of the device type."""
    probe: Callable[[], str | None] | None = None
    """None, or why it cannot be used on this machine. At most 5 ms; imports no third party."""
    verify: str | None = None
    """Path of a function like `probe` that may import the vendor; called for the chosen one only."""
    launch: str | None = None
    """Path of a light class with `launch_environment`, `visible_devices`."""
    config: str | None = None
    """Path of the attrs class of the plugin's options."""
    implementation: str | None = None
    """Path of the class built as `Plugin(config, run)`; of the click command in slot command."""


@frozen(kw_only=True)
class Record:
    """What discovery found under one entry point."""

    name: str
    slot: str
    """One of SLOTS; else the record is broken, and this the last part of the entry point's group."""
    distribution: str
    version: str
    card: Card | None = None
    fault: Status | None = None
    detail: str = ""
    """Why `fault`, in one line."""
    traceback: str = ""
    """Of a broken plugin whose import or card raised."""

    @cached_property
    def status(self) -> Status:
        """Computed on first use: asks the probe where nothing else is wrong."""
        return self.fault or ("unavailable" if self.reason else "available")

    @cached_property
    def reason(self) -> str:
        """Why it is not available; empty if it is."""
        if self.fault or self.card is None or self.card.probe is None:
            return self.detail
        try:
            answer: object = Patience()(self.card.probe)
        except KeyboardInterrupt:
            raise
        except HungError as error:
            return f"its probe {error}"
        except BaseException as error:  # a probe is a stranger's code; listing must survive it
            return f"its probe raised {_summary(error)}"
        if answer is None or isinstance(answer, str):
            return answer or ""
        return f"its probe gave {answer!r}, neither None nor a reason"

    @property
    def origin(self) -> str:
        """Distribution and version, as pip names them."""
        return f"{self.distribution} {self.version}"


@frozen
class Discovery:
    """Everything that is installed, by name; names are unique over all slots."""

    records: tuple[Record, ...]

    def get(self, name: str) -> Record | None:
        """The record of that name, if there is one; core's own, should a stranger claim its name."""
        found = [record for record in self.records if record.name == name]
        return min(found, key=lambda record: record.fault == "conflict", default=None)

    def of(self, slot: str) -> tuple[Record, ...]:
        """The records of one slot, highest priority first, then by name."""
        found = [record for record in self.records if record.slot == slot]
        return tuple(sorted(found, key=lambda record: (-_priority(record), record.name)))

    def usable(self, slot: str) -> list[tuple[Card, Record]]:
        """Those that `auto` may take, the best first: available, of some priority, in nobody's shadow."""
        found = [
            (record.card, record)
            for record in self.of(slot)
            if record.card and record.card.priority is not None and record.status == "available"
        ]
        shadowed = {name for card, _ in found for name in card.shadows}
        return [(card, record) for card, record in found if record.name not in shadowed]


def offering(word: str) -> str:
    """A remedy: the strategies that can be used here and whose cards offer a capability word."""
    usable = [record for record in discover().of("strategy") if record.status == "available"]
    able = [record.name for record in usable if record.card and word in record.card.offers]
    return f"choose a strategy that can: {', '.join(able)}" if able else "no strategy here can"


def plugin_status(name: str) -> str:
    """Whether a plugin can be used here: "available", or why not: "unavailable", "broken", ..., "missing"."""
    record = discover().get(name)
    return "missing" if record is None else record.status


def _priority(record: Record) -> int:
    priority = record.card.priority if record.card else None
    return -1 if priority is None else priority


def near(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`; did you mean 'x'?` if one of the known words looks like it, else nothing."""
    spelt = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), list(spelt), 1)
    return f"; did you mean {spelt[found[0]]!r}?" if found else ""


def discover(environment: Mapping[str, str] | None = None) -> Discovery:
    """Read the metadata of all installed distributions once, and import their cards.

    Names listed in ACCEL_PLUGINS_BLOCK (comma separated) are not imported; core's own plugins
    cannot be blocked.
    """
    environment = os.environ if environment is None else environment
    blocked = {name.strip() for name in environment.get(BLOCK_VARIABLE, "").split(",")}
    patience = Patience()
    records = [
        evolve(record, fault="blocked", detail=f"blocked by {BLOCK_VARIABLE}")
        if record.name in blocked and not target.startswith(GROUP)
        else _with_card(record, target, patience)
        for record, target in _entry_points()
    ]
    return Discovery(tuple(_refuse_clashes(records)))


def _entry_points() -> Iterator[tuple[Record, str]]:
    # Reading each entry_points.txt ourselves costs 1.6 ms; a look-up a slot through
    # metadata.entry_points() costs 11 ms.
    seen: set[str] = set()
    for distribution in metadata.distributions():
        entries = list(_parse(_read(distribution, "entry_points.txt")))
        if not entries:
            continue
        name, version = _identity(distribution)
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:  # an editable install is found twice; so is a shadowed older version
            continue
        seen.add(key)
        for slot, entry, target in entries:
            yield Record(name=entry, slot=slot, distribution=name, version=version), target


def _parse(text: str) -> Iterator[tuple[str, str, str]]:
    """(slot, name, target) of our entry points. Skips what is malformed: it may be a stranger's."""
    slot = ""
    for line in map(str.strip, text.splitlines() if GROUP in text else ()):
        if line.startswith("["):
            group = line.strip("[] ")
            slot = group.removeprefix(GROUP) if group.startswith(GROUP) else ""
        elif slot and "=" in line and line[0] not in "#;":
            name, _, target = line.partition("=")
            yield slot, name.strip(), target.partition("[")[0].strip()


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    # `distribution.name` and `.version` would parse all of METADATA, README included, each.
    text = _read(distribution, "METADATA") or _read(distribution, "PKG-INFO")
    head = text.replace("\r\n", "\n").partition("\n\n")[0]
    fields = dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    return fields.get("Name", "(a distribution without a name)").strip(), fields.get("Version", "?").strip()


def _read(distribution: metadata.Distribution, file: str) -> str:
    try:
        return distribution.read_text(file) or ""
    except (OSError, ValueError):  # unreadable, or no UTF-8: nothing to be found there
        return ""


def _with_card(record: Record, target: str, patience: Patience) -> Record:
    try:
        if record.slot not in SLOTS:
            about = f"unknown slot {record.slot!r}{near(record.slot, SLOTS)}"
            raise PluginError(f"{about}\nname the group accel_core.SLOT", plugin=record.name)
        own = target.startswith(GROUP)
        return _check_card(record, _resolve(target) if own else patience(lambda: _resolve(target)))
    except KeyboardInterrupt:
        raise
    except HungError as error:
        return evolve(record, fault="broken", detail=f"importing {target} {error}", traceback=error.where)
    except BaseException as error:  # SystemExit too: vendor packages quit while being imported
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return evolve(record, fault="broken", detail=_summary(error), traceback="".join(lines))


def _check_card(record: Record, card: object) -> Record:
    from accel_core.config.options import RESERVED_NAMES

    name, slot = record.name, record.slot
    if not isinstance(card, Card):
        about = f"entry point {name} does not point at a Card but at {card!r}"
        raise PluginError(f"{about}\nmake it an instance of accel_core.Card", plugin=name)
    problem = incompatibility(card.api_version)
    if problem:
        return evolve(record, card=card, fault="incompatible", detail=problem)
    if (card.slot, card.name) != (slot, name):
        raise PluginError(
            f"entry point {GROUP}{slot}: {name} points at the card of {card.name!r} in slot {card.slot}\n"
            "give both the same name and slot",
            plugin=name,
        )
    if name in RESERVED_NAMES:
        raise PluginError(f"{name!r} is a word of core's own config\ntake another name", plugin=name)
    return evolve(record, card=card)


def incompatibility(api_version: str) -> str:
    """Why a plugin for that contract cannot be served here; empty if it can."""
    from accel_core.hookspecs import API_VERSION

    theirs, ours = (tuple(map(int, version.split("."))) for version in (api_version, API_VERSION))
    if max(1, ours[0] - 1) <= theirs[0] and theirs <= ours:  # there never was a version 0
        return ""
    remedy = "upgrade accel-core" if theirs > ours else "upgrade the plugin"
    return f"written for API {api_version}, this accel-core serves {API_VERSION}: {remedy}"


def _refuse_clashes(records: Sequence[Record]) -> Iterator[Record]:
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    for record in records:
        rivals = by_name[record.name]
        if len(rivals) == 1 or record.fault == "blocked" or record.distribution == CORE:
            yield record
            continue
        origins = sorted(rival.origin for rival in rivals)
        loser = record.distribution if any(rival.distribution == CORE for rival in rivals) else "one of them"
        detail = f"{record.name!r} is provided by {' and '.join(origins)}; uninstall {loser}"
        yield evolve(record, card=None, fault="conflict", detail=detail)


def _summary(error: BaseException) -> str:
    """One line for a table; only core's own errors go without their type."""
    first = str(error).partition("\n")[0]
    if isinstance(error, PluginError):
        return first
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        first += near(error.name, dir(error.obj))  # a misspelt hook, mostly
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def implementation(record: Record) -> Callable[..., Any]:
    """The class, or the function that makes an instance, which the card names.

    Raises:
        PluginError: it names none, the import failed, or it cannot be called as `Plugin(config, run)`.
    """
    about = f"{record.slot} plugin {record.name!r} ({record.origin})"
    path = record.card.implementation if record.card else None
    if path is None:
        problem, remedy = "its card names no implementation", "set `implementation` in the card"
    else:
        found: object = load(record, path)
        if callable(found) and _takes(found, "config", "run"):
            return found
        remedy = "make it a class with `def __init__(self, config, run)`"
        problem = f"{path} cannot be built as Plugin(config, run)"
    raise PluginError(f"{about}: {problem}\n{remedy}", plugin=record.name, distribution=record.origin)


def _takes(function: Callable[..., Any], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # no signature is to be had of what is written in C
        return True
    return True


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(module.strip())
    for part in filter(None, name.strip().split(".")):
        value = getattr(value, part)
    return value


def load(record: Record, path: str) -> Any:
    """Import what a card names.

    Raises:
        PluginError: the import failed in whatever way, SystemExit included; the cause is attached.
    """
    try:
        with surviving():
            return _resolve(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # vendor imports quit, abort and raise anything
        raise PluginError(
            f"{record.slot} plugin {record.name!r} ({record.origin}) cannot be imported from {path}\n"
            f"{_summary(error)}\n"
            f"run `accel plugins doctor {record.name}` for the traceback, or choose another {record.slot}",
            plugin=record.name,
            distribution=record.origin,
        ) from error
