"""JSON Schema of config classes, for editors and for `accel config schema`."""

from __future__ import annotations

from typing import Any

from attrs import NOTHING

from accel_core.config.convert import plain, schema
from accel_core.config.parallelism import SECTION, about, dimensions
from accel_core.config.sections import CORE, Sections
from accel_core.contract.config import RunConfig
from accel_core.contract.options import Option, options_of


def whole_schema(sections: Sections) -> dict[str, Any]:
    """Return the schema of a file, with a section for each plugin that has options."""
    whole = class_schema(RunConfig)
    del whole["properties"]["plugins"]
    whole["properties"][SECTION] |= {"properties": _sizes(sections), "additionalProperties": False}
    whole["properties"] |= {name: class_schema(cls) for name, cls in sections.all() if name not in CORE}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _sizes(sections: Sections) -> dict[str, Any]:
    """Return dimension -> the schema of its size."""
    return {
        name: {
            "anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}],
            "description": " ".join(f"{it.name}: {about(name, it)}" for it in records),
        }
        for name, records in dimensions(sections.discovery).items()
    }


def class_schema(cls: type) -> dict[str, Any]:
    """Return the schema of a section, without options that can be set in Python only."""
    options = [option for option in options_of(cls).values() if not option.python_only]
    return {
        "title": cls.__name__,
        "description": (cls.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": {it.name: class_schema(it.section) if it.section else _option(it) for it in options},
        "required": [it.name for it in options if it.default is NOTHING],
        "additionalProperties": False,
    }


def _option(option: Option) -> dict[str, Any]:
    facts = {
        "description": option.sentence or NOTHING,
        "enum": list(option.choices) or NOTHING,
        "minimum": NOTHING if option.minimum is None else option.minimum,
        "default": NOTHING if hasattr(option.default, "takes_self") else option.default,
    }
    return schema(option.kind) | {name: plain(fact) for name, fact in facts.items() if fact is not NOTHING}
