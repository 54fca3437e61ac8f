"""A YAML file as a layer: one parse gives data and marks, so that each mistake has line and column."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any, Final

import yaml

from accel_core.config.reader import Layer, Problem
from accel_core.config.structure import Path

__all__ = ["read_yaml"]

_TAG: Final = "tag:yaml.org,2002:"
_REFUSED: Final = object()


def read_yaml(name: str, directory: FilePath, problems: list[Problem]) -> Layer:
    """The layer of one file; what is not YAML, or not keys and values, is added to `problems`."""
    reading = _Reading(name, problems)
    return Layer("file", reading.entries(directory / name), reading.origin)


class _Reading:
    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self.problems = problems
        self.marks: dict[Path, yaml.Mark] = {}
        self._open: set[int] = set()

    def origin(self, path: Path) -> str:
        """file:line:column of an option, or of what it lies in."""
        prefixes = (path[:length] for length in range(len(path), 0, -1))
        return self._at(next((self.marks[prefix] for prefix in prefixes if prefix in self.marks), None))

    def entries(self, file: FilePath) -> list[tuple[Path, Any]]:
        """The top-level keys and their raw values."""
        try:
            root = self._parse(file.read_text(encoding="utf-8-sig"))
        except OSError as error:
            return self._refuse(None, f"cannot be read: {error.strerror}")
        except UnicodeDecodeError:
            return self._refuse(None, "is not UTF-8 text")
        except yaml.YAMLError as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            return self._refuse(getattr(error, "problem_mark", None), f"is not YAML: {problem}")
        if root is None:
            return self._refuse(None, "is empty; `accel config init` writes one to start from")
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            return self._refuse(
                root.start_mark, f"holds {kind}; expected keys and values, as in `device: cpu`"
            )
        return [((key,), value) for key, value in self._mapping(root, ())]

    def _parse(self, text: str) -> yaml.Node | None:
        self._loader = yaml.SafeLoader(text)
        return self._loader.get_single_node()

    def _at(self, mark: yaml.Mark | None) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else self.name

    def _refuse(self, mark: yaml.Mark | None, message: str, path: Path = ()) -> list[Any]:
        self.problems.append(Problem(self._at(mark), path, message))
        return []

    def _value(self, node: yaml.Node, path: Path) -> Any:
        if id(node) in self._open:
            self._refuse(node.start_mark, "an alias stands inside what it names", path)
            return _REFUSED
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            self._refuse(node.start_mark, f"the tag {node.tag} has no meaning here", path)
            return _REFUSED
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            value: Any = dict(self._mapping(node, path))
        else:
            value = [self._value(item, (*path, str(number))) for number, item in enumerate(node.value)]
        self._open.discard(id(node))
        return value

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):  # a tag that is not YAML's own, or the 30th of February
            self._refuse(node.start_mark, f"{node.value!r} cannot be read as {node.tag}", path)
            return _REFUSED

    def _mapping(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        """What can be read of a mapping; what cannot is a problem, and left out."""
        self._find_duplicates(node, path)
        try:
            self._loader.flatten_mapping(node)  # `<<: *defaults`; own keys come last, and win
        except yaml.MarkedYAMLError as error:
            self._refuse(error.problem_mark, f"is not YAML: {error.problem}")
            return
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key.start_mark, "keys are text, not a list or mapping")
            elif key.tag != _TAG + "str":
                self._refuse(
                    key.start_mark, f"keys are text; write {key.value!r} in quotes", (*path, key.value)
                )
            else:
                place = (*path, key.value)
                self.marks[place] = key.start_mark
                raw = self._value(value, place)
                if raw is not _REFUSED:
                    yield key.value, raw

    def _find_duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        marks: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _TAG + "merge":
                continue
            first = marks.setdefault(key.value, key.start_mark)
            if first is not key.start_mark:
                message = f"given again; it is already on line {first.line + 1}"
                self._refuse(key.start_mark, message, (*path, key.value))
