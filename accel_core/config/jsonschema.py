"""JSON Schema of config classes, for editors and for `accel config schema`."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Literal, Union, get_args, get_origin

from attrs import NOTHING, Attribute

from accel_core.config.options import describe, options_of, section_class
from accel_core.config.reader import CORE, Reader
from accel_core.config.schema import RunConfig
from accel_core.config.structure import plain

__all__ = ["class_schema", "whole_schema"]

_NAMES: Final = {
    bool: "boolean",
    int: "integer",
    float: "number",
    timedelta: "number",
    str: "string",
    type(None): "null",
}


def whole_schema(reader: Reader) -> dict[str, Any]:
    """The schema of a whole file: core's options, and a section for each plugin that has options."""
    schema = class_schema(RunConfig)
    schema["properties"] = {name: part for name, part in schema["properties"].items() if name in CORE}
    schema["properties"] |= {name: class_schema(cls) for name, cls in reader.sections() if name not in CORE}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def class_schema(cls: type) -> dict[str, Any]:
    """The schema of one section; options that only Python can give are left out."""
    options = {name: it for name, it in options_of(cls).items() if not describe(it[0]).python_only}
    required = [name for name, (attribute, _) in options.items() if attribute.default is NOTHING]
    return {
        "title": cls.__name__,
        "description": (cls.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": {name: _option(attribute, kind) for name, (attribute, kind) in options.items()},
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }


def _option(attribute: Attribute[Any], kind: Any) -> dict[str, Any]:
    section = section_class(kind)
    if section is not None:
        return class_schema(section)
    about = describe(attribute)
    schema = _kind(kind)
    if about.help:
        schema["description"] = about.sentence
    if about.choices:
        schema["enum"] = [plain(choice) for choice in about.choices]
    if about.minimum is not None:
        schema["minimum"] = about.minimum
    default: Any = attribute.default
    if default is not NOTHING and not hasattr(default, "takes_self"):
        schema["default"] = plain(default)
    return schema


def _kind(kind: Any) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        members = [_kind(member) for member in arguments]
        if all(member.keys() == {"type"} for member in members):
            return {"type": [member["type"] for member in members]}
        return {"anyOf": members}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (tuple, list, Sequence):
        return {"type": "array", "items": _kind(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _kind(arguments[1])}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    return {"type": _NAMES[kind]} if kind in _NAMES else {}
