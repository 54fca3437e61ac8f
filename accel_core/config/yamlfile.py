"""A YAML file as a layer: one parse gives data and marks, so that each mistake has line and column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import yaml

from accel_core.config.reader import Layer, Problem
from accel_core.config.structure import Path

__all__ = ["read_yaml"]


def read_yaml(name: str, directory: FilePath, problems: list[Problem]) -> Layer:
    """The layer of one file; what is not YAML, or not keys and values, is added to `problems`."""
    reading = _Reading(name, problems)
    tree = reading.tree(directory / name)
    return Layer("file", [((key,), value) for key, value in tree.items()], reading.origin)


class _Reading:
    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self.problems = problems
        self.marks: dict[Path, yaml.Mark] = {}
        self._open: set[int] = set()

    def origin(self, path: Path) -> str:
        """file:line:column of an option, or of what it lies in."""
        mark = next((self.marks[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.marks), None)
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else self.name

    def tree(self, file: FilePath) -> Mapping[str, Any]:
        try:
            self._loader = yaml.SafeLoader(file.read_text(encoding="utf-8-sig"))
            node = self._loader.get_single_node()
        except OSError as error:
            return self._refuse(self.name, f"cannot be read: {error.strerror}")
        except UnicodeDecodeError:
            return self._refuse(self.name, "is not UTF-8 text")
        except yaml.MarkedYAMLError as error:
            return self._refuse(self._at(error.problem_mark), f"is not YAML: {error.problem}")
        except yaml.YAMLError as error:
            return self._refuse(self.name, f"is not YAML: {error}")
        if node is None:
            return self._refuse(self.name, "is empty; `accel config init` writes one to start from")
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            return self._refuse(
                self._at(node.start_mark), f"holds {kind}; expected keys and values, as in `device: cpu`"
            )
        return dict(self._mapping(node, ()))

    def _refuse(self, origin: str, message: str) -> Mapping[str, Any]:
        self.problems.append(Problem(origin, (), message))
        return {}

    def _at(self, mark: yaml.Mark | None) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else self.name

    def _value(self, node: yaml.Node, path: Path) -> Any:
        if id(node) in self._open:
            self._refuse(self._at(node.start_mark), "an alias stands inside what it names")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return dict(self._mapping(node, path))
            if isinstance(node, yaml.SequenceNode):
                return [self._value(item, (*path, str(number))) for number, item in enumerate(node.value)]
            return self._scalar(node)
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag that is not YAML's own, or 2026-02-30
            self._refuse(
                self._at(node.start_mark), f"cannot be read as {node.tag}: {str(error).splitlines()[0]}"
            )
            return None

    def _mapping(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        self._find_duplicates(node, path)
        self._loader.flatten_mapping(node)  # `<<: *defaults`; own keys come last, and win
        for key, value in node.value:
            place = (*path, str(key.value))
            self.marks[place] = key.start_mark
            if key.tag != "tag:yaml.org,2002:str":
                self._refuse(
                    self._at(key.start_mark),
                    f"{key.value}: keys are text; write {str(key.value)!r} in quotes",
                )
            else:
                yield key.value, self._value(value, place)

    def _find_duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            if key.value in first:
                message = f"given again; it is already on line {first[key.value].line + 1}"
                self.problems.append(Problem(self._at(key.start_mark), (*path, key.value), message))
            else:
                first[key.value] = key.start_mark
