"""Discovery of cards from package metadata, and the imports that a card names.

Discovery imports cards only (no torch, no vendor library), each when its name or slot is looked at, and
never raises: each entry point in a group `accel_core.<slot>` becomes a `Record`, whatever is wrong with
it. Only a card module that crashes in native code ends the process; the printed stack then names the
module.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import evolve, field, frozen

from accel_core.contract.arguments import did_you_mean
from accel_core.contract.card import SLOTS, Card, incompatibility
from accel_core.contract.world import World
from accel_core.errors import PluginError
from accel_core.plugins.timeout import CallTimeout, Outcome, PluginTimeoutError, surviving

if TYPE_CHECKING:
    from accel_core.contract.config import RunConfig


GROUP: Final = "accel_core."
CORE: Final = "accel-core"
BLOCK_VARIABLE: Final = "ACCEL_PLUGINS_BLOCK"


Status = Literal["available", "unavailable", "broken", "blocked", "conflict", "incompatible"]


@frozen(kw_only=True)
class Record:
    """A plugin that is installed, or the fault of its entry point."""

    name: str
    slot: str
    """One of SLOTS; a broken record may have another word."""
    distribution: str
    version: str
    card: Card | None = None
    fault: Status | None = None
    detail: str = ""
    """The reason of `fault`, in one line."""
    traceback: str = ""
    """The traceback of a broken plugin whose import or card raised."""
    _probed: list[Outcome[object]] = field(factory=list, init=False, repr=False, eq=False)

    @cached_property
    def status(self) -> Status:
        """The status, computed on first use: asks the probe where nothing else is wrong."""
        return self.fault or ("unavailable" if self.reason else "available")

    @cached_property
    def reason(self) -> str:
        """The reason why the plugin is not available, else empty."""
        if self.probe is None:
            return self.detail
        _ask_probes([self])
        answers, error = self._probed[0]
        if isinstance(error, PluginTimeoutError):
            return f"its probe {error}"
        if error is not None:
            return f"its probe raised {_summary(error)}"
        (answer,) = answers
        if answer is None or isinstance(answer, str):
            return answer or ""
        return f"its probe gave {answer!r}, neither None nor a reason"

    @property
    def probe(self) -> Callable[[], object] | None:
        """The probe of the card, unless something else is wrong."""
        return None if self.fault or self.card is None else self.card.probe

    @property
    def origin(self) -> str:
        """Distribution and version, as pip names them."""
        return f"{self.distribution} {self.version}"

    def error(self, text: str) -> PluginError:
        """Return the error that says this of the plugin."""
        about = f"{self.slot} plugin {self.name!r} ({self.origin})"
        return PluginError(f"{about}{text}", plugin=self.name, distribution=self.origin)


@frozen(eq=False, repr=False)
class Discovery:
    """All installed plugins; names are unique over all slots.

    A card is imported when its name or its slot is asked for.
    """

    _found: Sequence[Record]
    _targets: Mapping[int, str] = field(factory=dict)
    """Position of a record -> the card to import for it."""
    _whole: dict[int, Record] = field(factory=dict, init=False)
    """Position of a record -> the record with its card."""
    _timeout: CallTimeout = field(factory=CallTimeout, init=False)
    """Shared, so that hanging cards in several slots cost no more than in one."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records; imports no card."""
        return tuple(record.name for record in self._found)

    @property
    def blocked(self) -> frozenset[str]:
        """The names that ACCEL_PLUGINS_BLOCK blocked."""
        return frozenset(record.name for record in self._found if record.fault == "blocked")

    @property
    def records(self) -> tuple[Record, ...]:
        """All records; imports all their cards."""
        return self._with_cards(lambda record: True)

    def get(self, name: str) -> Record | None:
        """Return the record of a name, if any; core's own wins a clash."""
        records = self._with_cards(lambda record: record.name == name)
        return min(records, key=lambda record: record.fault == "conflict", default=None)

    def of(self, slot: str) -> tuple[Record, ...]:
        """Return the records of one slot, highest priority first, then by name."""
        records = self._with_cards(lambda record: record.slot == slot)
        return tuple(sorted(records, key=lambda record: (-_priority(record), record.name)))

    def answering(self, slot: str, word: str) -> tuple[Record, ...]:
        """Return the plugin of this name, else those with the word in `also`, best first."""
        record = self.get(word)
        if record is not None and record.slot == slot:
            return (record,)
        return tuple(each for each in self.of(slot) if each.card and word in each.card.also)

    def usable(self, slot: str) -> list[tuple[Card, Record]]:
        """Return the plugins that `auto` may select, best first, without shadowed ones."""
        named = [(record.card, record) for record in self.of(slot) if record.card]
        wanted = [(card, record) for card, record in named if card.priority is not None]
        _ask_probes([record for _, record in wanted])
        usable = [(card, record) for card, record in wanted if record.status == "available"]
        shadowed = {name for card, _ in usable for name in card.shadows}
        return [(card, record) for card, record in usable if record.name not in shadowed]

    def _with_cards(self, wanted: Callable[[Record], bool]) -> tuple[Record, ...]:
        positions = [position for position, record in enumerate(self._found) if wanted(record)]
        new = {at: self._targets[at] for at in positions if at in self._targets and at not in self._whole}
        known = [target for at, target in new.items() if self._found[at].slot in SLOTS]
        cards = _import_cards(known, self._timeout)
        self._whole.update({at: _with_card(self._found[at], target, cards) for at, target in new.items()})
        return tuple(self._whole.get(at, self._found[at]) for at in positions)


def offering(word: str) -> str:
    """Return a remedy that names the usable strategies with a capability word."""
    usable = [record for record in discover().of("strategy") if record.status == "available"]
    able = [record.name for record in usable if record.card and word in record.card.offers]
    return f"choose a strategy that can: {', '.join(able)}" if able else "no strategy here can"


def plugin_status(name: str) -> str:
    """Return a plugin's status: "available", "unavailable", ..., or "missing"."""
    record = discover().get(name)
    return "missing" if record is None else record.status


def _ask_probes(records: Iterable[Record]) -> None:
    """Ask the probes that were not asked before, in one thread.

    To start a thread costs more than to ask most of them.
    """
    asked = [(record, record.probe) for record in records if not record._probed]
    pairs = [(record, probe) for record, probe in asked if probe is not None]
    outcomes = CallTimeout().each([probe for _, probe in pairs])
    for (record, _), outcome in zip(pairs, outcomes, strict=True):
        record._probed.append(outcome)


def _priority(record: Record) -> int:
    priority = record.card.priority if record.card else None
    return -1 if priority is None else priority


def discover(environment: Mapping[str, str] | None = None) -> Discovery:
    """Read the metadata of all installed distributions once.

    Names listed in ACCEL_PLUGINS_BLOCK (comma separated) are never imported; core's own plugins
    cannot be blocked.
    """
    environment = os.environ if environment is None else environment
    blocked = blocked_names(environment)
    found = list(_entry_points())
    records = [
        evolve(record, fault="blocked", detail=f"blocked by {BLOCK_VARIABLE}")
        if record.name in blocked and not target.startswith(GROUP)
        else record
        for record, target in found
    ]
    records = list(_refuse_clashes(records))
    targets = {at: target for at, (_, target) in enumerate(found) if not records[at].fault}
    return Discovery(records, targets)


def blocked_names(environment: Mapping[str, str]) -> Sequence[str]:
    """Return the names in ACCEL_PLUGINS_BLOCK."""
    names = map(str.strip, environment.get(BLOCK_VARIABLE, "").split(","))
    return tuple(filter(None, names))


def _import_cards(targets: Iterable[str], timeout: CallTimeout) -> Mapping[str, Outcome[Any]]:
    """Import third-party cards that are not imported yet, in one thread.

    To start a thread costs more than to import most of them.
    """
    third_party = [target for target in dict.fromkeys(targets) if not target.startswith(GROUP)]
    wanted = [target for target in third_party if _imported(target) is None]
    return dict(zip(wanted, timeout.each([partial(_resolve, each) for each in wanted]), strict=True))


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
    """(slot, name, target) of our entry points; malformed lines are skipped."""
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
    except (OSError, ValueError):  # unreadable, or not UTF-8: nothing can be found there
        return ""


def _with_card(record: Record, target: str, cards: Mapping[str, Outcome[Any]]) -> Record:
    try:
        if record.slot not in SLOTS:
            about = f"unknown slot {record.slot!r}{did_you_mean(record.slot, SLOTS)}"
            raise PluginError(f"{about}\nname the group accel_core.SLOT", plugin=record.name)
        if target not in cards:
            return _check_card(record, _resolve(target) if target.startswith(GROUP) else _imported(target))
        answers, error = cards[target]
        if error is not None:
            raise error
        return _check_card(record, answers[0])
    except KeyboardInterrupt:
        raise
    except PluginTimeoutError as error:
        return evolve(record, fault="broken", detail=f"importing {target} {error}", traceback=error.where)
    except BaseException as error:  # SystemExit too: vendor packages quit while being imported
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return evolve(record, fault="broken", detail=_summary(error), traceback="".join(lines))


def _check_card(record: Record, card: object) -> Record:
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
    return evolve(record, card=card)


def _refuse_clashes(records: Sequence[Record]) -> Iterator[Record]:
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    for record in records:
        rivals = by_name[record.name]
        if len(rivals) == 1 or record.fault == "blocked" or record.distribution == CORE:
            yield record
            continue
        yield evolve(record, fault="conflict", detail=_clash(record, rivals))


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
    """One line for a table; only core's own errors leave out their type."""
    first = str(error).partition("\n")[0]
    if isinstance(error, PluginError):
        return first
    if isinstance(error, AttributeError) and isinstance(error.name, str):
        first += did_you_mean(error.name, dir(error.obj))  # a misspelt hook, mostly
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def implementation(record: Record) -> Callable[..., Any]:
    """Return the class that the card names, or the function that makes an instance.

    Raises:
        PluginError: it names none, the import failed, or it cannot be called as `Plugin(config, run)`.
    """
    path = record.card.implementation if record.card else None
    if path is None:
        problem, remedy = "its card names no implementation", "set `implementation` in the card"
    else:
        plugin: object = load(record, path)
        if callable(plugin) and _takes(plugin, "config", "run"):
            return plugin
        remedy = "make it a class with `def __init__(self, config, run)`"
        problem = f"{path} cannot be built as Plugin(config, run)"
    raise record.error(f": {problem}\n{remedy}")


def _takes(function: Callable[..., Any], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # functions written in C may have no signature
        return True
    return True


def _imported(path: str) -> Any:
    """Return an object as `_resolve` does, if its module is imported already.

    Return None of others. Nothing third-party runs here, so it needs no thread with a timeout.
    """
    module, _, name = path.partition(":")
    found = sys.modules.get(module.strip())
    is_whole = found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False)
    return vars(found).get(name.strip()) if is_whole else None


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = importlib.import_module(module.strip())
    for part in filter(None, name.strip().split(".")):
        value = getattr(value, part)
    return value


def load(record: Record, path: str) -> Any:
    """Import an object by the dotted path that a card names.

    Raises:
        PluginError: the import failed in whatever way, SystemExit included; the cause is attached.
    """
    return _third_party(record, f"imported from {path}", partial(_resolve, path))


def verify(record: Record) -> str | None:
    """Return the reason that the card's `verify` gives, if any.

    It may import the vendor's library.

    Raises:
        PluginError: as `load`; of the call, too.
    """
    if record.card is None or record.card.verify is None:
        return None
    ask = load(record, record.card.verify)
    answer = _third_party(record, f"verified by {record.card.verify}", ask)
    if answer is None or isinstance(answer, str):
        return answer
    return f"{record.card.verify} gave {answer!r}, neither None nor a reason"


def _third_party(record: Record, what: str, call: Callable[[], Any]) -> Any:
    try:
        with surviving():
            return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # vendor imports quit, abort and raise anything
        raise record.error(
            f" cannot be {what}\n{_summary(error)}\n"
            f"run `accel plugins doctor {record.name}` for the traceback, or choose another {record.slot}"
        ) from error


def environment_of(record: Record, config: RunConfig, world: World) -> Mapping[str, str]:
    """Return the variables that the plugin's vendor library needs.

    Raises:
        PluginError: the answer is not a mapping of text, or as `launch_hooks`.
    """
    hook = launch_hooks(record).get("launch_environment")
    if hook is None:
        return {}
    answer = _third_party(record, "asked for launch_environment", partial(hook, config, world))
    if answer is None:
        return {}
    if not isinstance(answer, Mapping) or not all(
        isinstance(it, str) for pair in answer.items() for it in pair
    ):
        about = f", hook launch_environment: it gave {answer!r}"
        raise record.error(f"{about}\nreturn a mapping of variables to text, which may be empty")
    return answer


def visible_devices(record: Record, config: RunConfig) -> int | None:
    """Return the plugin's count of this machine's devices; None if nothing tells it.

    Raises:
        PluginError: the answer is not (variable, number or None), or as `launch_hooks`.
    """
    hook = launch_hooks(record).get("visible_devices")
    if hook is None:
        return None
    match _third_party(record, "asked for visible_devices", partial(hook, config)):
        case (str(), None):
            return None
        case (str(), int() as count) if count >= 0 and not isinstance(count, bool):
            return count
        case answer:
            about = f", hook visible_devices: it gave {answer!r}"
            raise record.error(f"{about}\nreturn the variable that masks devices, and their number or None")


def launch_hooks(record: Record) -> Mapping[str, Callable[..., Any]]:
    """Make the `launch` class of an available plugin; return its hooks.

    Raises:
        PluginError: the class cannot be made, or has a hook that is wrong.
    """
    if record.card is None or record.card.launch is None or record.status != "available":
        return {}
    from accel_core.plugins.binding import Binder

    path = record.card.launch
    helper = _third_party(record, f"built from {path}", load(record, path))
    return Binder().launch_class(helper, name=record.name, slot=record.slot, origin=record.origin)
