"""Discovery of cards from package metadata, and the imports that a card names.

Discovery imports cards only (no torch, no vendor library), each card when its name or slot is asked for.
Discovery never raises: each entry point in a group `accel_core.<slot>` becomes a `Record`, with its fault
if it has one. Folders are read again when `sys.path` or a folder on it changes; records stay the same
objects as long as the entry points are the same files.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from accel_core.contract.arguments import did_you_mean
from accel_core.contract.card import SLOTS, Card, check_words, incompatibility
from accel_core.errors import PluginError

if TYPE_CHECKING:
    from accel_core.contract.config import RunConfig
    from accel_core.contract.world import World


GROUP: Final = "accel_core."
CORE: Final = "accel-core"
BLOCK_VARIABLE: Final = "ACCEL_PLUGINS_BLOCK"


Status = Literal["available", "unavailable", "broken", "blocked", "conflict", "incompatible"]


class Imported(NamedTuple):
    """The card of an entry point, or its fault."""

    card: Card | None = None
    fault: Status | None = None
    detail: str = ""
    traceback: str = ""


class Record:
    """A plugin that is installed, or the fault of its entry point.

    Args:
        name: name of the entry point.
        slot: a word of SLOTS; a broken record may have another word.
        distribution: name of the distribution, as in its metadata folder.
        version: version of the distribution.
        target: import path of the card, which is imported on first use.
        known: replaces the import of the card, for a blocked or conflicting plugin.
    """

    def __init__(
        self,
        *,
        name: str,
        slot: str,
        distribution: str,
        version: str,
        target: str = "",
        known: Imported | None = None,
    ) -> None:
        self.name, self.slot, self.target, self.known = name, slot, target, known
        self.distribution, self.version = distribution, version

    def __repr__(self) -> str:
        return f"Record({self.slot} {self.name!r} of {self.origin})"

    @cached_property
    def _imported(self) -> Imported:
        return self.known or _import_card(self)

    @cached_property
    def card(self) -> Card | None:
        """The card; None if the plugin is broken."""
        return self._imported.card

    @cached_property
    def fault(self) -> Status | None:
        """The status if the plugin has a fault, so that its probe is not called; else None."""
        return self._imported.fault

    @property
    def detail(self) -> str:
        """The reason of `fault`, in one line."""
        return self._imported.detail

    @property
    def traceback(self) -> str:
        """The traceback of a broken plugin whose import or card raised."""
        return self._imported.traceback

    @cached_property
    def status(self) -> Status:
        """The status, computed on first use; calls the probe if the plugin has no other fault."""
        return self.fault or ("unavailable" if self.reason else "available")

    @cached_property
    def reason(self) -> str:
        """The reason why the plugin is not available; empty if it is available."""
        if self.fault or self.card is None or self.card.probe is None:
            return self.detail
        try:
            return self.card.probe() or ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a probe may raise anything
            return f"its probe raised {_summary(error)}"

    @property
    def origin(self) -> str:
        """Distribution and version, such as `accel-fsdp 0.1`."""
        return f"{self.distribution} {self.version}"

    @cached_property
    def implementation(self) -> Callable[..., Any]:
        """The class that the card names, or the function that makes an instance.

        Raises:
            PluginError: the card names no implementation, or the import failed.
        """
        path = self.card.implementation if self.card else None
        if path is None:
            raise self.error(": its card names no implementation\nset `implementation` in the card")
        plugin: Callable[..., Any] = load(self, path)
        return plugin

    def error(self, text: str) -> PluginError:
        """Return an error about this plugin, with the text appended."""
        about = f"{self.slot} plugin {self.name!r} ({self.origin})"
        return PluginError(f"{about}{text}", plugin=self.name, distribution=self.origin)


class Discovery:
    """All installed plugins; names are unique over all slots.

    A card is imported on first use of its record, or of its slot.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records; imports no card."""
        return tuple([record.name for record in self.records])

    @property
    def blocked(self) -> frozenset[str]:
        """The names of installed plugins that ACCEL_PLUGINS_BLOCK blocks."""
        known = (each for each in self.records if each.known)
        return frozenset(record.name for record in known if record.fault == "blocked")

    def get(self, name: str) -> Record | None:
        """Return the record of a name, if any; in a conflict, core's own record."""
        records = self.by_name.get(name, [])
        if len(records) < 2:
            return records[0] if records else None
        return next((each for each in records if each.fault != "conflict"), records[0])

    @cached_property
    def by_name(self) -> Mapping[str, list[Record]]:
        """Name -> its records, several in a conflict."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.name, []).append(record)
        return found

    def of(self, slot: str) -> tuple[Record, ...]:
        """Return the records of one slot, highest priority first, then by name."""
        records = [record for record in self.records if record.slot == slot]
        return tuple(sorted(records, key=lambda record: (-_priority(record), record.name)))

    def answering(self, slot: str, word: str) -> tuple[Record, ...]:
        """Return the plugin of this name, else the plugins with the word in `also`, best first."""
        record = self.get(word)
        if record is not None and record.slot == slot:
            return (record,)
        return tuple(each for each in self.of(slot) if each.card and word in each.card.also)

    def usable(self, slot: str) -> list[tuple[Card, Record]]:
        """Return the plugins that `auto` may select, best first, without shadowed plugins."""
        wanted = [(record.card, record) for record in self.of(slot) if record.card]
        usable = [
            (card, record)
            for card, record in wanted
            if card.priority is not None and record.status == "available"
        ]
        shadowed = {name for card, _ in usable for name in card.shadows}
        return [(card, record) for card, record in usable if record.name not in shadowed]


def suggest_strategy(word: str) -> str:
    """Return the remedy that names the usable strategies with a capability word."""
    usable = [record for record in discover().of("strategy") if record.status == "available"]
    able = [record.name for record in usable if record.card and word in record.card.offers]
    return f"choose a strategy that can: {', '.join(able)}" if able else "no strategy here can"


def plugin_status(name: str) -> str:
    """Return a plugin's status: "available", "unavailable", ..., or "missing"."""
    record = discover().get(name)
    return "missing" if record is None else record.status


def _priority(record: Record) -> int:
    priority = record.card.priority if record.card else None
    return -1 if priority is None else priority


def discover(environment: Mapping[str, str] | None = None) -> Discovery:
    """Read the metadata of all installed distributions, once per process while nothing is installed.

    Plugins named in ACCEL_PLUGINS_BLOCK (comma separated) are never imported; core's own plugins cannot be
    blocked.
    """
    blocked = blocked_names(os.environ if environment is None else environment)
    folders = [path or "." for path in sys.path]
    changed = [(path, os.path.getmtime(path)) for path in folders if os.path.exists(path)]
    return _discover(blocked, _entry_points(tuple(changed)))


@lru_cache(maxsize=2)
def _discover(blocked: Sequence[str], entries: Sequence[_Entry]) -> Discovery:
    found = Discovery(
        [
            Record(name=name, slot=slot, distribution=distribution, version=version, target=target)
            for name, slot, distribution, version, target, _ in entries
        ]
    )
    for record in found.records:
        rivals = found.by_name[record.name]
        if record.name in blocked and not record.target.startswith(GROUP):
            record.known = Imported(fault="blocked", detail=f"blocked by {BLOCK_VARIABLE}")
        elif len(rivals) > 1 and record.distribution != CORE:
            record.known = Imported(fault="conflict", detail=_clash(record, rivals))
    return found


def blocked_names(environment: Mapping[str, str]) -> Sequence[str]:
    """Return the names in ACCEL_PLUGINS_BLOCK."""
    names = map(str.strip, environment.get(BLOCK_VARIABLE, "").split(","))
    return tuple(filter(None, names))


_Entry: TypeAlias = tuple[str, str, str, str, str, tuple[str, float]]
"""(name, slot, distribution, version, target, (folder and time of change of its file))"""


@lru_cache(maxsize=1)
def _entry_points(_: object) -> Sequence[_Entry]:
    """Return accel-core's entry points, once per distribution.

    An editable install is found twice, and an older version further down the path too: the first counts.
    `importlib.metadata` does the same, but takes 20 ms to import and as long for some 250 distributions.
    """
    seen: set[str] = set()
    found: list[_Entry] = []
    for folder in sys.path:
        for info, changed, text in _entry_point_files(folder or "."):
            stem = info.rpartition(".")[0]  # NAME-VERSION, or NAME alone for some .egg-info
            name, _, version = stem.partition("-")
            name = name.replace("_", "-")
            key = name.replace(".", "-").lower()
            entries = _parse(text)
            if entries and key not in seen:
                seen.add(key)
                common, file = (name, version or "?"), (f"{folder}/{info}", changed)
                found += [(entry, slot, *common, target, file) for slot, entry, target in entries]
    return tuple(found)


def _entry_point_files(folder: str) -> Iterator[tuple[str, float, str]]:
    """Yield (metadata folder, time of change, text) of each entry_points.txt with an accel-core group.

    Unreadable files and folders are skipped: no plugin could be imported from there.
    """
    with suppress(OSError):
        for info in sorted(os.listdir(folder)):
            if info.endswith((".dist-info", ".egg-info")):
                with suppress(OSError), open(f"{folder}/{info}/entry_points.txt", "rb") as file:
                    text = file.read()
                    if GROUP.encode() in text:
                        yield info, os.fstat(file.fileno()).st_mtime, text.decode(errors="replace")


def _parse(text: str) -> list[tuple[str, str, str]]:
    """Return (slot, name, target) of accel-core's entry points; malformed lines are skipped."""
    slot, found = "", []
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[] ")
            slot = group.removeprefix(GROUP) if group.startswith(GROUP) else ""
        elif slot and "=" in line and line[0] not in "#;":
            name, _, target = line.partition("=")
            found.append((slot, name.strip(), target.partition("[")[0].strip()))
    return found


def _import_card(record: Record) -> Imported:
    try:
        if record.slot not in SLOTS:
            about = f"unknown slot {record.slot!r}{did_you_mean(record.slot, SLOTS)}"
            raise PluginError(f"{about}\nname the group accel_core.SLOT", plugin=record.name)
        return _check_card(record, _resolve(record.target))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: vendor packages quit while being imported
        return Imported(fault="broken", detail=_summary(error), traceback=own_traceback(error, record.target))


def own_traceback(error: BaseException, *targets: str) -> str:
    """Return the traceback of an error with the frames of a plugin only: of the packages of `targets`."""
    import traceback  # late: most cards can be imported
    from importlib.util import find_spec

    specs = [find_spec(target.partition(":")[0].partition(".")[0]) for target in targets]
    homes = [
        home for spec in specs if spec for home in spec.submodule_search_locations or [spec.origin or ""]
    ]
    shown = traceback.TracebackException.from_exception(error)
    chain: list[Any] = [shown]
    while chain:
        each = chain.pop()
        own = [frame for frame in each.stack if frame.filename.startswith(tuple(filter(None, homes)))]
        each.stack = traceback.StackSummary.from_list(own)
        chain += filter(None, (each.__cause__, each.__context__))
    return "".join(shown.format()).rstrip()


def _check_card(record: Record, card: object) -> Imported:
    if not isinstance(card, Card):
        about = f"entry point {record.name} does not point at a Card but at {card!r}"
        raise PluginError(f"{about}\nmake it an instance of accel_core.Card", plugin=record.name)
    problem = incompatibility(card)
    if problem:  # before the words of the card, since a newer API may have more words
        return Imported(card, "incompatible", problem)
    check_words(card)
    if (card.slot, card.name) != (record.slot, record.name):
        raise PluginError(
            f"entry point {GROUP}{record.slot}: {record.name} points at the card of {card.name!r} in slot"
            f" {card.slot}\ngive both the same name and slot",
            plugin=record.name,
        )
    return Imported(card)


def _clash(record: Record, rivals: Sequence[Record]) -> str:
    if all(rival.distribution == record.distribution for rival in rivals):
        slots = " and ".join(sorted(rival.slot for rival in rivals))
        return (
            f"{record.origin} calls its {slots} {record.name!r}; names are unique over all slots: rename one"
        )
    origins = sorted(rival.origin for rival in rivals)
    loser = record.distribution if any(rival.distribution == CORE for rival in rivals) else "one of them"
    return f"{record.name!r} is provided by {' and '.join(origins)}; uninstall {loser}"


def _summary(error: BaseException) -> str:
    """Return one line for a table; the type of an error is left out only for core's own errors."""
    first = str(error).partition("\n")[0]
    if isinstance(error, PluginError):
        return first
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        first += did_you_mean(error.name, dir(error.obj))  # a misspelt hook, mostly
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(module.strip())
    for part in filter(None, name.strip().split(".")):
        value = getattr(value, part)
    return value


def load(record: Record, path: str) -> Any:
    """Import an object by the dotted path that a card names.

    Raises:
        PluginError: the import raised any error, SystemExit included; the cause is attached.
    """
    return guarded(record, f"imported from {path}", partial(_resolve, path))


def verify(record: Record) -> str | None:
    """Return the reason that the card's `verify` gives, if any. `verify` may import the vendor's library.

    Raises:
        PluginError: the import of `verify` or its call failed.
    """
    reason: str | None = _called(record, "verify")
    return reason


def guarded(record: Record, what: str, call: Callable[[], Any]) -> Any:
    """Run a plugin's code and return its result.

    The second argument completes the error's "cannot be ...", as "imported from PATH" does.

    Raises:
        PluginError: the code raised any error, SystemExit included; the cause is attached.
    """
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # vendor imports quit, abort and raise anything
        raise record.error(
            f" cannot be {what}\n{_summary(error)}\n"
            f"run `accel plugins doctor {record.name}` for the traceback, or choose another {record.slot}"
        ) from error


def environment_of(record: Record, config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the environment variables that the plugin's vendor library needs.

    Raises:
        PluginError: the import of the card's function or its call failed.
    """
    variables: Mapping[str, str] | None = _called(record, "launch_environment", config, world)
    return variables or {}


def visible_devices(record: Record, config: RunConfig) -> int | None:
    """Return the plugin's count of this machine's devices; None if the plugin cannot count them.

    Raises:
        PluginError: the import of the card's function or its call failed.
    """
    count: int | None = _called(record, "visible_devices", config)
    return count


def _called(record: Record, field: str, *arguments: object) -> Any:
    """Call the function that a field of the card names; None if the field is empty or the plugin unusable."""
    path = getattr(record.card, field, None)
    if path is None or record.status != "available":
        return None
    return guarded(record, f"asked for {field}", partial(load(record, path), *arguments))
