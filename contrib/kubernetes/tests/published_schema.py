"""The published schemas, read as strictly as `kubectl create --validate=strict` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).with_name("schemas")


def mistakes(manifest: str) -> list[str]:
    """Return what the schema of its kind refuses in a manifest."""
    document = yaml.safe_load(manifest)
    file = SCHEMAS / f"{document['kind'].lower()}.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert document["apiVersion"].endswith(f"/{schema['$comment']['version']}")
    errors = Draft202012Validator(_strict(schema)).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


def _strict(schema: Any) -> Any:
    """Refuse unknown fields: servers drop them without a word."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(part) for key, part in schema.items() if key != "properties"}
    if "properties" in schema:
        found["properties"] = {name: _strict(part) for name, part in schema["properties"].items()}
        found.setdefault("additionalProperties", False)
    return found
