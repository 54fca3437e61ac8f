"""YAML as plain values: PyYAML parses the structure, and an option's type decides how scalars are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any, Final

import yaml
from attrs import define, field

from accel_core.config.sources import ConfigProblem, Origin, RawText, Setting
from accel_core.contract.options import Path

MOST_VALUES: Final = 10_000
_TAGS: Final = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}


@define(eq=False)
class Document:
    """The values of a document, the place of each key, and the mistakes in mappings."""

    name: str = ""
    places: dict[Path, Origin] = field(factory=dict)
    problems: list[ConfigProblem] = field(factory=list)
    room: int = MOST_VALUES
    """Number of values that the document may still have."""

    def at(self, mark: yaml.Mark | None) -> Origin:
        """Return file, line and column."""
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        return Origin("file", self.name, *place)

    def value(self, node: Any, path: Path = ()) -> Any:
        """Return the value of a node; raise MarkedYAMLError if it has a tag, or aliases repeat too much."""
        self.room -= 1
        if not self.room:  # nine aliases of nine aliases, seven times over, are five million values
            message = "its aliases, written out, are more values than a config can hold"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)
        if node.tag != f"tag:yaml.org,2002:{_TAGS[type(node)]}":
            message = f"the tag {node.tag!r} has no meaning here; leave it out"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path) for item in node.value]
        if node.style is not None:  # in quotes
            return str(node.value)
        return None if node.value in ("", "~") else RawText(node.value)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key, value in sorted(node.value, key=lambda pair: bool(pair[0].value != "<<")):
            mark, inner = key.start_mark, (*path, key.value)
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(mark, path, "keys are text, not a list or mapping")
            elif key.value == "<<" and isinstance(value, yaml.MappingNode):
                values = self._mapping(value, path)  # the mapping's own keys come later, and win
            else:
                if key.value in lines:
                    self._refuse(mark, inner, f"given again; it is already on line {lines[key.value]}")
                lines[key.value], self.places[inner] = mark.line + 1, self.at(mark)
                values[key.value] = self.value(value, inner)
        return values

    def _refuse(self, mark: yaml.Mark | None, path: Path, message: str) -> None:
        self.problems.append(ConfigProblem(self.at(mark), path, message))


def read_yaml(document: Document, directory: FilePath) -> Iterator[Setting]:
    """Yield the settings of a file; mistakes are added to the document."""
    mark = None
    try:
        text = (directory / document.name).read_text(encoding="utf-8-sig")
        document.room = max(document.room, len(text))
        root = yaml.compose(text, Loader=yaml.BaseLoader)  # BaseLoader keeps scalars as text
        if isinstance(root, yaml.MappingNode):
            values = document.value(root)
            yield from (Setting((key,), values[key], document.places[key,]) for key in values)
            return
        message = "holds no keys and values, as in `device: cpu`; `accel config init` writes a file"
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        words = [getattr(error, name, None) for name in ("problem", "strerror")]
        message = f"cannot be read: {next(filter(None, words), str(error).partition(chr(10))[0])}"
    document.problems.append(ConfigProblem(document.at(mark), (), message))


def read_text(text: str) -> Any:
    """Read a list, a mapping or quoted text of a shell; return other text unchanged."""
    document = Document()
    try:
        value = document.value(yaml.compose(text, Loader=yaml.BaseLoader))
    except (yaml.YAMLError, RecursionError):
        return str(text)
    return str(text) if document.problems else value
