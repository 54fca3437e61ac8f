"""Pass 2 of a config, then: one table of typed options, from placed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

from attrs import define, field

from accel_core.config.convert import shown
from accel_core.config.placing import Placement
from accel_core.config.sources import ConfigProblem, SourceValue
from accel_core.contract.options import Path, describe, is_secret

ALIASES: Final[Mapping[Path, Path]] = {("accumulation", "num_steps"): ("gradient_accumulation_steps",)}
"""A second name of an option -> the first."""


@define(slots=False, eq=False, repr=False)  # attrs compiles another method for cached properties of slots
class Table:
    """Typed options by path. Mistakes are collected, so that all are told at once."""

    placement: Placement
    problems: list[ConfigProblem]
    settings: dict[Path, SourceValue] = field(factory=dict)
    """Path of an option -> its typed value, from the strongest source."""

    def read(self) -> Table:
        """Convert and merge the placed values, the weakest source first. Called once."""
        for placed in self.placement.options:
            value, attribute = placed.value, placed.attribute
            path = ALIASES.get(value.path, value.path)
            if value.value is None and path != value.path:
                continue  # unset, so that the first name counts
            try:
                typed = placed.convert()
            except (TypeError, ValueError) as error:
                self.problems.append(ConfigProblem(value.origin, value.path, str(error)))
            else:
                secret = describe(attribute).secret or is_secret(path[-1])
                self._merge(value._replace(value=typed, path=path), secret)
        return self

    def with_values(self, values: Sequence[SourceValue]) -> Table:
        """Return a new table with the values of a further source.

        What is typed is not read again: a value may be a generator.
        """
        before = self.placement
        placement = Placement(
            before.sections,
            objects=dict(before.objects),
            aliases=dict(before.aliases),
            classes=dict(before.classes),
            notes=dict(before.notes),
        )
        placement.place(values)
        return Table(placement, placement.problems, dict(self.settings)).read()

    def within(self, path: Path) -> Sequence[Path]:
        """Paths of the options and objects given for a section and the sections in it."""
        return self._index.get(path, ())

    @cached_property
    def _index(self) -> Mapping[Path, list[Path]]:
        # A search through all options for each section would be quadratic.
        index: dict[Path, list[Path]] = {}
        mirrors = [alias for alias, path in ALIASES.items() if path in self.settings]
        for path in (*self.settings, *self.placement.objects, *mirrors):
            for depth in range(len(path) + 1):
                index.setdefault(path[:depth], []).append(path)
        return index

    def _merge(self, new: SourceValue, secret: bool) -> None:
        """Let the stronger source win; refuse a contradiction that must be a mistake.

        Python may not contradict a flag or a variable, and a proposal may not contradict any source. A
        source may not contradict itself either, by two names of one option for instance.
        """
        old = self.settings.setdefault(new.path, new)
        if old is new or old.value == new.value:
            if new.source != "proposal":
                self.settings[new.path] = new
            return
        ours, theirs = (repr(shown(value, secret)) for value in (new.value, old.value))
        if new.source == "proposal":
            message = f"wants {ours}, but it is {theirs} by {old.origin}"
        elif new.source == old.source != "preset" or (
            new.source == "python" and old.source not in ("preset", "file")
        ):
            message = f"{ours} here, but {theirs} by {old.origin}; give it once"
        else:
            origin = f"{new.origin} (over {theirs} from {old.origin})"
            self.settings[new.path] = new._replace(origin=origin)
            return
        self.problems.append(ConfigProblem(new.origin, new.path, message))
