"""JSON Schema of config classes, for editors and for `accel config schema`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, get_args

from attrs import NOTHING, Attribute

from accel_core.config.convert import is_union, members, plain, shape
from accel_core.config.sections import CORE, Sections
from accel_core.contract.config import RunConfig
from accel_core.contract.options import describe, options_of, section_class

_NAMES: Final = {
    bool: "boolean",
    int: "integer",
    float: "number",
    timedelta: "number",
    str: "string",
    Path: "string",
    type(None): "null",
}


def whole_schema(sections: Sections) -> dict[str, Any]:
    """Return the schema of a file, with a section for each plugin with options."""
    schema = class_schema(RunConfig)
    schema["properties"] = {name: part for name, part in schema["properties"].items() if name in CORE}
    schema["properties"] |= {name: class_schema(cls) for name, cls in sections.all() if name not in CORE}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def class_schema(cls: type) -> dict[str, Any]:
    """Return the schema of a section, without options that only Python can give."""
    options = {name: pair for name, pair in options_of(cls).items() if not describe(pair[0]).python_only}
    return {
        "title": cls.__name__,
        "description": (cls.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": {name: _option(attribute, kind) for name, (attribute, kind) in options.items()},
        "required": [name for name, (attribute, _) in options.items() if attribute.default is NOTHING],
        "additionalProperties": False,
    }


def _option(attribute: Attribute[Any], kind: Any) -> dict[str, Any]:
    section = section_class(kind)
    if section is not None:
        return class_schema(section)
    about, default = describe(attribute), attribute.default
    facts = {
        "description": about.sentence or NOTHING,
        "enum": [plain(choice) for choice in about.choices] or NOTHING,
        "minimum": NOTHING if about.minimum is None else about.minimum,
        "default": NOTHING if hasattr(default, "takes_self") else default,
    }
    return _kind(kind) | {name: plain(fact) for name, fact in facts.items() if fact is not NOTHING}


def _kind(kind: Any) -> dict[str, Any]:
    if is_union(kind):
        return {"anyOf": [_kind(member) for member in get_args(kind)]}
    if members(kind):
        return {"enum": plain(members(kind))}
    if shape(kind) is list:
        return {"type": "array", "items": _kind((*get_args(kind), Any)[0])}
    if shape(kind) is Mapping:
        return {"type": "object", "additionalProperties": _kind((*get_args(kind), Any, Any)[1])}
    return {"type": _NAMES[kind]} if kind in _NAMES else {}
