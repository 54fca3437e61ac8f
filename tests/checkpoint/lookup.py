"""Where a checkpoint's files lie, as docs/checkpoint-format.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def manifest_in(folder: Path) -> Path:
    """The manifest that counts."""
    return max(folder.glob("manifest-*.json"))


def members_of(folder: Path) -> dict[str, Any]:
    return json.loads(manifest_in(folder).read_bytes())


def home_of(folder: Path) -> Path:
    """The folder of the save that counts."""
    return folder / members_of(folder)["save_id"]


def file_in(folder: Path, name: str) -> Path:
    """A file of the checkpoint by its name; `manifest.json` stands for the manifest."""
    return manifest_in(folder) if name == "manifest.json" else home_of(folder) / name
