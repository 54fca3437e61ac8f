"""A run's plugins, and how they are chosen.

A plugin that is asked for by name is used, or an error is raised. `auto` gives reasons for its choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from attrs import evolve, frozen

from accel_core.config.parallelism import SECTION, dimensions
from accel_core.config.resolve import Resolved, load
from accel_core.config.unused import TYPED, auto_may_take, unused_options, unused_sections
from accel_core.contract.arguments import quoted
from accel_core.contract.card import CAPABILITIES, Card, Slot
from accel_core.errors import ConfigError, PluginError
from accel_core.plugins.catalog import not_installed, strategy_hint, unknown_device
from accel_core.plugins.discovery import Discovery, Record


@frozen(init=False)
class Chosen:
    """A plugin of the stack, and why it is in it."""

    record: Any
    """Result of discovery."""
    why: str
    name: str
    card: Card
    """The plugin's card; a chosen plugin always has one."""

    def __init__(self, record: Any, why: str) -> None:
        self.__attrs_init__(record, why, record.name, record.card)


@frozen(kw_only=True, eq=False, repr=False)
class Stack:
    """The plugins of a run, chosen but not yet loaded."""

    device: Chosen
    precision: Chosen
    strategies: Mapping[str, Chosen]
    """Alias -> strategy plugin.

    A strategy that is asked for by its own name has this name as its alias.
    """
    default: str
    """Alias of the strategy of units that name none."""
    extensions: tuple[Chosen, ...] = ()
    trackers: tuple[Chosen, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes about sections of a file, and options, that do nothing in this stack."""

    @property
    def strategy(self) -> Chosen:
        """The default strategy."""
        return self.strategies[self.default]

    @property
    def offers(self) -> frozenset[str]:
        """The capability words of the whole default stack, by its cards."""
        return frozenset().union(*[chosen.card.offers for chosen in self._defaults])

    @property
    def _defaults(self) -> Sequence[Chosen]:
        return (self.device, self.strategy, self.precision, *self.extensions)

    def members(self) -> Sequence[Chosen]:
        """Return every chosen plugin, bottom layer first."""
        return (self.device, self.precision, *self.strategies.values(), *self.extensions, *self.trackers)

    def __str__(self) -> str:
        return " + ".join(chosen.name for chosen in self._defaults)


def decide(
    python: Mapping[str, object],
    objects: Sequence[object],
    presets: Mapping[str, tuple[object, str]],
    processes: int,
    *,
    discovery: Discovery,
) -> tuple[Resolved, Stack]:
    """Resolve the config and choose its stack, whose plugins may propose values of the config."""
    resolved = load(python=python, objects=objects, presets=presets, discovery=discovery)
    stack = choose(resolved, processes, discovery)
    others = {it.name: it for it in stack.members() if it.record.slot != "strategy"}
    decided = resolved.with_proposals(
        {name: it.record for name, it in {**others, **stack.strategies}.items()}
    )
    # A plugin may propose a precision, which is a plugin of the stack itself.
    if decided.config.mixed_precision != resolved.config.mixed_precision:
        stack = choose(decided, processes, discovery)
    return decided, stack


def choose(resolved: Resolved, processes: int, discovery: Discovery) -> Stack:
    """Return the stack that the config asks for, for a world of `processes`.

    Raises:
        ConfigError: a plugin is not installed, or the combination is impossible.
        PluginError: a named plugin cannot be used, or `auto` cannot decide between two plugins.
    """
    config = resolved.config
    chooser = _Chooser(resolved, discovery)
    aliases = {
        alias: chooser.named("strategy", str(options["plugin"]), f"strategies.{alias}.plugin")
        for alias, options in config.strategies.items()
    }
    device = chooser.device(config.device)
    extensions = [chooser.named("extension", name, "extensions") for name in dict.fromkeys(config.extensions)]
    extensions += [given for given in chooser.by_object("extension") if given.name not in config.extensions]
    extensions += chooser.joining(chosen.name for chosen in extensions)
    default = config.strategy
    if default not in aliases:
        offered = frozenset().union(*[plugin.card.offers for plugin in (device, *extensions)])
        chosen = chooser.strategy(default, processes, offered)
        default = chosen.name
        aliases[default] = chosen
    extensions += chooser.dividing(processes, aliases[default], extensions)
    precision = "fp32" if config.mixed_precision == "no" else config.mixed_precision
    stack = Stack(
        device=device,
        precision=chooser.named("precision", precision, "mixed_precision"),
        strategies=aliases,
        default=default,
        extensions=tuple(extensions),
        trackers=tuple(chooser.trackers(config.log_with)),
    )
    _refuse_unmet_needs(stack, discovery)
    unused = tuple(_refuse_unused(resolved, stack, discovery))
    used = {*stack.strategies, *[chosen.name for chosen in stack.members()]}
    return evolve(stack, notes=(*unused, *unused_options(resolved, used)))


class _Chooser(NamedTuple):
    resolved: Resolved
    discovery: Discovery

    def named(self, slot: Slot, name: str, path: str) -> Chosen:
        origin = self.resolved.origins.get(path, "default")
        answers = self.discovery.answering(slot, name)
        if not answers:
            missing = not_installed(name, slot, self.discovery)
            raise ConfigError(f"{path} ({origin}): {missing}\n`accel plugins` lists what is installed")
        record = answers[0]
        usable = [(each.card, each) for each in answers if each.card and each.status == "available"]
        if usable and record.name != name:
            best = self._first(usable, f"{path}: {name}", path)
            return Chosen(best, f"answers {name}, asked for by {origin}")
        if record.status != "available":
            raise PluginError(
                f"{path}: {record.name} ({origin}) cannot be used here: {record.status}: {record.reason}\n"
                f"`accel plugins doctor {record.name}` looks closer; `accel plugins` lists the others",
                plugin=record.name,
                distribution=record.origin,
            )
        return Chosen(record, f"asked for by {origin}" if origin != "default" else "default")

    def device(self, asked: str) -> Chosen:
        if asked == "auto":
            # native is always usable, unless an installation is broken: then `named` raises the reason.
            return self._best("device") or self.named("device", "native", "device")
        kind = asked.partition(":")[0]
        record = self.discovery.get(kind)
        if record is not None and record.slot == "device":
            return self.named("device", kind, "device")
        _require_torch_device(kind, self.resolved.origins.get("device", "default"), self.discovery)
        native = self.named("device", "native", "device")
        return Chosen(native.record, f"torch runs {kind}, and no installed plugin is named after it")

    def strategy(self, asked: str, processes: int, offered: frozenset[str]) -> Chosen:
        given, setting = self.by_object("strategy"), self.resolved.settings.get(("strategy",))
        others = [chosen.name for chosen in given if asked not in ("auto", chosen.name)]
        from_file = setting is not None and setting.origin.source in ("preset", "file")
        if len(given) > 1 or (others and not from_file):
            names = ", ".join(chosen.name for chosen in given)
            raise ConfigError(
                f"Accelerator was given the config of {names}, but strategy is {quoted(asked)}"
                f" ({self.resolved.origins.get('strategy', 'default')})\n"
                "ask for one of them: name it, or leave the other's config object out"
            )
        if others and setting:
            return Chosen(given[0].record, f"{given[0].why} (over {quoted(asked)} from {setting.origin})")
        if given:
            return given[0]
        if asked != "auto":
            if asked == "single" and processes > 1:
                raise ConfigError(
                    f"strategy: single ({self.resolved.origins.get('strategy', 'default')}) in a world of"
                    f" {processes} processes would train {processes} separate models\n"
                    "name a strategy that joins them, or start one process: accel launch -n 1"
                )
            return self.named("strategy", asked, "strategy")
        if processes == 1:
            return Chosen(self.named("strategy", "single", "strategy").record, "auto: one process")
        # If no strategy supports this device, take the best one: `_refuse_unmet_needs` lists missing words.
        best = self._best("strategy", offered) or self._best("strategy")
        if best is None:
            raise ConfigError(
                f"strategy: auto found no strategy for {processes} processes\n{strategy_hint(self.discovery)}"
            )
        return best

    def trackers(self, names: Sequence[str]) -> Iterator[Chosen]:
        if "all" in names:
            usable = [record for record in self.discovery.of("tracker") if record.status == "available"]
            yield from (Chosen(record, "log_with has all") for record in usable)
        else:
            yield from (self.named("tracker", name, "log_with") for name in dict.fromkeys(names))

    def joining(self, others: Iterable[str]) -> list[Chosen]:
        """Return the extensions with a priority, which join each run if they are installed."""
        usable, taken = self.discovery.usable("extension"), {*others}
        return [
            Chosen(record, "auto: it joins every run") for _, record in usable if record.name not in taken
        ]

    def dividing(self, processes: int, strategy: Chosen, extensions: Sequence[Chosen]) -> list[Chosen]:
        """Return the extensions that the sizes of section `parallelism` bring in.

        Raises:
            ConfigError: no plugin divides ranks along a dimension, two do, or an extension that was named has
                no size.
        """
        sizes = self.resolved.config.parallelism
        brought: list[Chosen] = []
        for name, size in sizes.items():
            if size == 1 or (size == -1 and processes == 1):
                continue
            at = f"{SECTION}.{name}"
            about = f"{at} is {size} ({self.resolved.origins[at]})"
            owners = [it for it in (strategy, *extensions, *brought) if name in it.card.dimensions]
            if len(owners) > 1:
                both = " and ".join(f"{it.record.slot} {it.name}" for it in owners)
                raise ConfigError(f"{about}: {both} would both divide ranks so\nleave one of them out")
            if not owners:
                brought.append(Chosen(self._owner(name, about, strategy), about))
        for chosen in extensions:
            idle = chosen.card.dimensions and not chosen.card.dimensions.keys() & sizes.keys()
            if idle and processes > 1:
                at = " or ".join(f"{SECTION}.{name}" for name in chosen.card.dimensions)
                raise ConfigError(
                    f"extension {chosen.name} ({chosen.why}) divides ranks, and {at} is not set\n"
                    f"set {at}: to a number of ranks, or to -1 for all that are left"
                )
        return brought

    def _owner(self, name: str, about: str, strategy: Chosen) -> Record:
        """Return the installed extension that divides ranks along a dimension."""
        records = dimensions(self.discovery)[name]
        extension = next((it for it in records if it.slot == "extension"), None)
        if extension is not None and extension.status == "available":
            return extension
        if extension is not None:
            remedy = f"extension {extension.name} has it, and cannot be used here: {extension.reason}"
        else:
            remedy = " or ".join(f"set strategy: {it.name}" for it in records)
        raise ConfigError(
            f"{about}: strategy {strategy.name} ({strategy.why}) has no such dimension\n{remedy}"
        )

    def by_object(self, slot: Slot) -> list[Chosen]:
        """Return the plugins of a slot whose config objects were given in Python."""
        records = [self.discovery.get(name) for name in self.resolved.objects]
        return [
            Chosen(record, "its config object was given in Python")
            for record in records
            if record and record.slot == slot
        ]

    def _best(self, slot: Slot, offered: frozenset[str] = frozenset(CAPABILITIES)) -> Chosen | None:
        """Return the usable plugin of highest priority whose needs are offered.

        A plugin that another usable plugin shadows does not count.
        """
        usable = [
            (card, record)
            for card, record in self.discovery.usable(slot)
            if card.needs <= offered | card.offers
        ]
        if not usable:
            return None
        best = self._first(usable, f"{slot}: auto", slot)
        return Chosen(best, f"auto: usable, and of the highest priority ({usable[0][0].priority})")

    def _first(self, usable: Sequence[tuple[Card, Record]], asked: str, path: str) -> Record:
        """Return the first plugin; raise PluginError if another plugin has the same priority."""
        top = [record for card, record in usable if card.priority == usable[0][0].priority]
        if len(top) > 1:
            rivals = " and ".join(f"{record.name} ({record.origin})" for record in top)
            raise PluginError(
                f"{asked} cannot decide between {rivals}\nset {path}: {top[0].name}, or another"
            )
        return top[0]


def _require_torch_device(kind: str, origin: str, discovery: Discovery) -> None:
    import torch

    problem = unknown_device(kind, discovery)
    if problem:
        raise ConfigError(f"device ({origin}): {problem}\n`accel plugins` lists what is installed")
    if kind != "cpu" and not torch.get_device_module(kind).is_available():
        raise ConfigError(
            f"device: {kind} ({origin}): torch {torch.__version__} knows this device type, but finds no such"
            " device here\nchoose device: cpu, or auto"
        )


def _refuse_unused(resolved: Resolved, stack: Stack, discovery: Discovery) -> Iterator[str]:
    """Yield notes on unused sections of files and Python; raise ConfigError for flags and variables."""
    used = {chosen.name for chosen in stack.members()} | {resolved.config.launch.launcher}
    used -= {chosen.name for alias, chosen in stack.strategies.items() if alias != chosen.name}
    problems = []
    for record, given, setting in unused_sections(resolved, used | set(stack.strategies), discovery):
        about = f"{given.origin}: {record.slot} {record.name} is not in this run ({stack})"
        if given.origin.source in TYPED:
            problems.append(f"{about}\nchoose it ({setting}), or leave its options out")
        elif given.origin.source in ("file", "python") and not auto_may_take(record, resolved):
            yield f"{about}: its options do nothing; `{setting}` chooses it"
    if problems:
        raise ConfigError("\n".join(problems), problems=problems)


def _refuse_unmet_needs(stack: Stack, discovery: Discovery) -> None:
    offers = stack.offers
    for member in stack.members():
        unmet = member.card.needs - offers
        if unmet:
            raise ConfigError(
                f"{member.record.slot} {member.name} ({member.why}) needs {', '.join(sorted(unmet))},"
                f" which the stack {stack} does not offer\n"
                f"choose another {member.record.slot}, or another strategy or device{_able(unmet, discovery)}"
            )


def _able(words: AbstractSet[str], discovery: Discovery) -> str:
    """Return a hint at the strategies that offer these words, to append to a remedy."""
    usable = [it for it in discovery.of("strategy") if it.status == "available"]
    names = [it.name for it in usable if it.card and words <= it.card.offers]
    return f": set strategy: {' or '.join(names)}" if names else ""
