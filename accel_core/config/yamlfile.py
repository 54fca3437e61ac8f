"""A YAML file, read with PyYAML's nodes: one parse gives data and the line and column of each key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any, Final

import yaml
from attrs import define, field

from accel_core.config.options import Path
from accel_core.config.problems import Problem
from accel_core.config.sources import Given, Keys

__all__ = ["read_yaml"]

_TAG: Final = "tag:yaml.org,2002:"
_REFUSED: Final = object()


def read_yaml(name: str, directory: FilePath, problems: list[Problem]) -> Given:
    """What one file gives; what is not YAML, or not keys and values, is added to `problems`."""
    return Given((), _Reading(name, problems).whole(directory / name), "file", name)


@define
class _Reading:
    name: str
    problems: list[Problem]
    _loader: yaml.SafeLoader = field(init=False)
    _open: set[int] = field(factory=set)

    def whole(self, file: FilePath) -> Keys | None:
        try:
            self._loader = yaml.SafeLoader(file.read_text(encoding="utf-8-sig"))
            root = self._loader.get_single_node()
        except OSError as error:
            self._refuse(None, f"cannot be read: {error.strerror}")
        except UnicodeDecodeError:
            self._refuse(None, "is not UTF-8 text")
        except yaml.YAMLError as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            self._refuse(getattr(error, "problem_mark", None), f"is not YAML: {problem}")
        else:
            if isinstance(root, yaml.MappingNode):
                return self._keys(root, ())
            found = "holds a list" if isinstance(root, yaml.SequenceNode) else "holds a single value"
            remedy = "expected keys and values, as in `device: cpu`"
            if root is None:
                found, remedy = "is empty", "`accel config init` writes one to start from"
            self._refuse(root.start_mark if root else None, f"{found}; {remedy}")
        return None

    def _at(self, mark: yaml.Mark | None) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}" if mark else self.name

    def _refuse(self, mark: yaml.Mark | None, message: str, path: Path = ()) -> None:
        self.problems.append(Problem(self._at(mark), path, message))

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
            value: Any = self._keys(node, path)
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

    def _keys(self, node: yaml.MappingNode, path: Path) -> Keys:
        """What can be read of a mapping; what cannot is a problem, and left out."""
        found = Keys()
        for key, value in self._entries(node, path):
            raw = self._value(value, (*path, key.value))
            if raw is not _REFUSED:
                found[key.value], found.origins[key.value] = raw, self._at(key.start_mark)
        return found

    def _entries(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _TAG + "merge":
                mark = first.setdefault(key.value, key.start_mark)
                if mark is not key.start_mark:
                    message = f"given again; it is already on line {mark.line + 1}"
                    self._refuse(key.start_mark, message, (*path, key.value))
        try:
            self._loader.flatten_mapping(node)  # `<<: *defaults`; own keys come last, and win
        except yaml.MarkedYAMLError as error:
            self._refuse(error.problem_mark, f"is not YAML: {error.problem}")
            return
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key.start_mark, "keys are text, not a list or mapping")
            elif key.tag != _TAG + "str":
                message = f"keys are text; write {key.value!r} in quotes"
                self._refuse(key.start_mark, message, (*path, key.value))
            else:
                yield key, value
