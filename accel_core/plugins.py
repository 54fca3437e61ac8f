"""Cards, their discovery from package metadata, and the loading of what they name.

Discovery imports cards only (no torch, no vendor library) and never raises: each entry point in a
group `accel_core.<slot>` becomes a `Record`, whatever is wrong with it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from functools import cached_property
from importlib import metadata
from typing import Any, Final, Literal, get_args

from attrs import Attribute, evolve, field, frozen

from accel_core.errors import PluginError

__all__ = ["CAPABILITIES", "SLOTS", "Card", "Discovery", "Record", "discover", "load"]

Slot = Literal["device", "precision", "launcher", "strategy", "tracker", "extension", "command"]
SLOTS: Final[tuple[Slot, ...]] = get_args(Slot)
GROUP: Final = "accel_core."
BLOCK_VARIABLE: Final = "ACCEL_PLUGINS_BLOCK"
CARD_IMPORT_SECONDS: Final = 5.0

CAPABILITIES: Final[Mapping[str, str]] = {
    "bf16": "trains under autocast to bfloat16",
    "fp16": "trains under autocast to float16 with a loss scaler",
    "float64": "holds and computes float64 tensors",
    "memory_stats": "reports the bytes it has allocated",
    "rng": "saves and restores its random generators",
    "process_per_device": "several processes, each with a device of its own, form a world",
    "collectives.torch": "torch.distributed process groups carry its tensors",
    "no_sync": "leaves out gradient communication inside an accumulation window",
    "join": "ranks may run out of batches at different times",
    "whole_weights": "each rank holds whole parameters",
}
"""The closed vocabulary of `offers` and `needs`: word -> what a plugin that offers it promises."""

Status = Literal["available", "unavailable", "broken", "blocked", "conflict", "incompatible"]


def _name(card: Card, attribute: Attribute[str], value: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", value):
        raise PluginError(
            f"plugin name {value!r} is not lower-case words joined by single hyphens", plugin=value
        )


def _slot(card: Card, attribute: Attribute[str], value: str) -> None:
    if value not in SLOTS:
        raise PluginError(f"{card.name}: unknown slot {value!r}{near(value, SLOTS)}", plugin=card.name)


def _capabilities(card: Card, attribute: Attribute[frozenset[str]], value: frozenset[str]) -> None:
    for word in sorted(value - CAPABILITIES.keys()):
        raise PluginError(
            f"{card.name}: unknown capability {word!r} in {attribute.name}{near(word, CAPABILITIES)}",
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
    api_version: str
    """The contract this was written for, "major.minor" of `hookspecs.API_VERSION`."""
    priority: int | None = None
    """For `auto`: native 0, first-party 100. None: only when named."""
    shadows: tuple[str, ...] = ()
    """Plugins of the same slot that `auto` must not take when this one is usable."""
    distributed_type: str | None = None
    """The value of `accelerator.distributed_type`; the strategy's wins over the device's."""
    offers: frozenset[str] = field(default=frozenset(), converter=frozenset, validator=_capabilities)
    needs: frozenset[str] = field(default=frozenset(), converter=frozenset, validator=_capabilities)
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
    slot: Slot
    distribution: str
    version: str
    card: Card | None = None
    fault: Status | None = None
    detail: str = ""
    """Why `fault`; for broken plugins the last line of the traceback."""
    traceback: str = ""

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
            return self.card.probe() or ""
        except Exception as error:  # a probe is a stranger's code; listing must survive it
            return f"its probe raised {type(error).__name__}: {error}"

    @property
    def origin(self) -> str:
        """Distribution and version, as pip names them."""
        return f"{self.distribution} {self.version}"


@frozen
class Discovery:
    """Everything that is installed, by name; names are unique over all slots."""

    records: tuple[Record, ...]

    def get(self, name: str) -> Record | None:
        """The record of that name, if there is one."""
        return next((record for record in self.records if record.name == name), None)

    def of(self, slot: Slot) -> tuple[Record, ...]:
        """The records of one slot, highest priority first, then by name."""
        found = [record for record in self.records if record.slot == slot]
        return tuple(sorted(found, key=lambda record: (-_priority(record), record.name)))


def _priority(record: Record) -> int:
    priority = record.card.priority if record.card else None
    return -1 if priority is None else priority


def near(word: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """`; did you mean 'x'?` if one of the known words looks like it, else nothing."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def discover(environment: Mapping[str, str] = os.environ) -> Discovery:
    """Read the metadata of all installed distributions once, and import their cards.

    Names listed in ACCEL_PLUGINS_BLOCK (comma separated) are not imported; core's own plugins
    cannot be blocked.
    """
    blocked = {name.strip() for name in environment.get(BLOCK_VARIABLE, "").split(",")} - {""}
    loader = _CardLoader()
    records = [
        _record(slot, name, target, distribution, blocked, loader)
        for slot, name, target, distribution in _entry_points()
    ]
    return Discovery(tuple(_refuse_clashes(records)))


def _entry_points() -> Iterator[tuple[Slot, str, str, metadata.Distribution]]:
    # Reading each entry_points.txt ourselves costs 1.6 ms; a look-up a slot through
    # metadata.entry_points() costs 11 ms. An editable install can be found twice (egg-info).
    seen: set[str] = set()
    for distribution in metadata.distributions():
        text = distribution.read_text("entry_points.txt")
        if not text or GROUP not in text:
            continue
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        if name in seen:
            continue
        seen.add(name)
        parser = ConfigParser(delimiters=("=",), interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        for slot in SLOTS:
            if parser.has_section(GROUP + slot):
                for entry, target in parser.items(GROUP + slot):
                    yield slot, entry, target, distribution


def _record(
    slot: Slot,
    name: str,
    target: str,
    distribution: metadata.Distribution,
    blocked: set[str],
    loader: _CardLoader,
) -> Record:
    record = Record(
        name=name, slot=slot, distribution=distribution.metadata["Name"], version=distribution.version
    )
    if name in blocked and not target.startswith("accel_core."):
        return evolve(record, fault="blocked", detail=f"blocked by {BLOCK_VARIABLE}")
    try:
        card = loader(target)
        _check_card(card, slot, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: vendor packages quit while being imported
        lines = traceback.format_exception(error)
        summary = str(error) if isinstance(error, PluginError) else lines[-1].strip()
        return evolve(record, fault="broken", detail=summary, traceback="".join(lines))
    incompatible = _incompatibility(card.api_version)
    if incompatible:
        return evolve(record, card=card, fault="incompatible", detail=incompatible)
    return evolve(record, card=card)


def _check_card(card: object, slot: Slot, name: str) -> None:
    from accel_core.config.schema import RESERVED_NAMES

    if not isinstance(card, Card):
        raise PluginError(f"entry point {name} does not point at a Card but at {card!r}", plugin=name)
    if (card.slot, card.name) != (slot, name):
        raise PluginError(
            f"entry point {GROUP}{slot}: {name} points at the card of {card.name!r} in slot {card.slot}",
            plugin=name,
        )
    if name in RESERVED_NAMES:
        raise PluginError(f"{name!r} is a section of core's own config; take another name", plugin=name)


def _incompatibility(api_version: str) -> str:
    from accel_core.hookspecs import API_VERSION

    match = re.fullmatch(r"(\d+)\.(\d+)", api_version)
    if match is None:
        return f"api_version {api_version!r} is not major.minor"
    theirs = (int(match[1]), int(match[2]))
    ours = tuple(map(int, API_VERSION.split(".")))
    if theirs > ours:
        return f"written for API {api_version}, this accel-core serves {API_VERSION}: pip install -U accel-core"
    if theirs[0] < ours[0] - 1:
        return f"written for API {api_version}, this accel-core serves {API_VERSION}: upgrade the plugin"
    return ""


def _refuse_clashes(records: Sequence[Record]) -> Iterator[Record]:
    for record in records:
        others = [other for other in records if other.name == record.name and other is not record]
        if not others or record.distribution == "accel-core":
            yield record
        else:
            rivals = " and ".join(sorted({record.origin, *(other.origin for other in others)}))
            yield evolve(
                record, card=None, fault="conflict", detail=f"{record.name!r} is provided by {rivals}; uninstall one"
            )


class _CardLoader:
    """Imports cards on a daemon thread, so that one that hangs costs seconds, not the listing."""

    def __call__(self, target: str) -> Any:
        if target.startswith("accel_core."):
            return _resolve(target)
        outcome: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                outcome.append((_resolve(target), None))
            except BaseException as error:  # handed over to the caller, who records it
                outcome.append((None, error))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(CARD_IMPORT_SECONDS)
        if not outcome:
            raise PluginError(f"importing {target} took longer than {CARD_IMPORT_SECONDS:g} s")
        value, error = outcome[0]
        if error is not None:
            raise error
        return value


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(module.strip())
    for part in name.strip().split("."):
        value = getattr(value, part)
    return value


def load(record: Record, path: str) -> Any:
    """Import what a card names.

    Raises:
        PluginError: the import failed in whatever way, SystemExit included; the cause is attached.
    """
    try:
        return _resolve(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # vendor imports quit, abort and raise anything
        hint = ""
        if isinstance(error, AttributeError) and getattr(error, "name", None):
            hint = near(str(error.name), dir(error.obj))
        raise PluginError(
            f"{record.slot} plugin {record.name!r} ({record.origin}) cannot be imported from {path}\n"
            f"{type(error).__name__}: {error}{hint}\n"
            f"run `accel plugins doctor {record.name}` for the traceback, or choose another {record.slot}",
            plugin=record.name,
            distribution=record.origin,
        ) from error
