"""A YAML file, read by PyYAML with the line and column of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Final

import yaml

from accel_core.config.sources import ConfigProblem, LocatedDict, SourceValue, decimal
from accel_core.contract.options import Path

_TAG: Final = "tag:yaml.org,2002:"


def read_yaml(name: str, directory: FilePath, problems: list[ConfigProblem]) -> Iterator[SourceValue]:
    """Read the values of a file; its syntax errors go to `problems`."""
    message, mark = "is empty; `accel config init` writes one to start from", None
    try:
        path = directory / name
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            problems.append(ConfigProblem(name, (), "is not an ordinary file; write the settings into one"))
            return
        loader = _Loader(path.read_text(encoding="utf-8-sig"), name, problems)
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            keys: LocatedDict = loader.construct_document(root)
            yield from (SourceValue((key,), value, "file", keys.origins[key]) for key, value in keys.items())
            return
        if root is not None:
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            message, mark = f"holds {kind}; expected keys and values, as in `device: cpu`", root.start_mark
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        message = "is not UTF-8 text"
    except yaml.MarkedYAMLError as error:
        message, mark = f"is not YAML: {error.problem}", error.problem_mark
    except yaml.YAMLError as error:  # a character that no YAML may hold
        message = f"is not YAML: {str(error).partition(chr(10))[0]}"
    except RecursionError:
        message = "holds too many brackets within brackets"
    problems.append(ConfigProblem(_at(name, mark), (), message))


def _at(name: str, mark: yaml.Mark | None) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


UNREADABLE: Final = (KeyError, TypeError, ValueError)
"""PyYAML's errors for a tag that does not fit its value: `!!bool x`, `!!int x`."""


class Values(yaml.SafeLoader):
    """A loader of what JSON can hold: no dates, bytes, sets or ambiguous numbers."""

    # A date would be text by the time that workers get it from the launcher.
    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own class attributes
        letter: [(tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp"]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors = {  # noqa: RUF012
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def number(self, node: yaml.ScalarNode) -> int | float:
        plainly = decimal(str(node.value))
        if plainly:
            problem = f"{node.value} may mean two numbers: write {plainly}, or {node.value!r} in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        whole = node.tag == _TAG + "int"
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


# YAML 1.1 needs a point and a sign, as in 1.0e-4, and reads 1e-4 as text.
_EXPONENT: Final = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
Values.add_implicit_resolver(_TAG + "float", _EXPONENT, list("-+.0123456789"))
for _kind in ("int", "float"):
    Values.add_constructor(_TAG + _kind, Values.number)


class _Loader(Values):
    """A loader that keeps places, and collects the mistakes in mappings."""

    def __init__(self, text: str, name: str, problems: list[ConfigProblem]) -> None:
        super().__init__(text)
        self._file, self._problems = name, problems
        self._path: Path = ()

    def _refuse(self, mark: yaml.Mark | None, message: str) -> None:
        self._problems.append(ConfigProblem(_at(self._file, mark), self._path, message))

    def mapping(self, node: yaml.MappingNode) -> LocatedDict:
        mapping, above, first = LocatedDict(), self._path, dict[str, yaml.Mark]()
        own = {id(key) for key, _ in node.value if key.tag != _TAG + "merge"}
        self.flatten_mapping(node)  # `<<: *defaults`; own keys come last, and win
        for key, value in node.value:
            self._path, mark = above, key.start_mark
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(mark, "keys are text, not a list or mapping")
                continue
            self._path = (*above, key.value)
            if key.tag != _TAG + "str":
                self._refuse(mark, f"keys are text; write {key.value!r} in quotes")
                continue
            if id(key) in own and first.setdefault(key.value, mark) is not mark:
                self._refuse(mark, f"given again; it is already on line {first[key.value].line + 1}")
            try:
                mapping[key.value] = self.construct_object(value, deep=True)
                mapping.origins[key.value] = _at(self._file, mark)
            except yaml.MarkedYAMLError as error:  # a tag that is not YAML's own, an alias inside its anchor
                self._refuse(error.problem_mark, f"cannot be read: {error.problem}")
            except UNREADABLE as error:
                self._refuse(value.start_mark, f"cannot be read: {type(error).__name__}: {error}")
        self._path = above
        return mapping


_Loader.add_constructor(_TAG + "map", _Loader.mapping)
