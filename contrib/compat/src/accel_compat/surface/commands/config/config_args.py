"""Accelerate's config files, as plain objects with its keys for attributes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from accel_compat.refusing import unserved

hf_cache_home = os.path.expanduser(
    os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
)
cache_dir = os.path.join(hf_cache_home, "accelerate")
default_json_config_file = os.path.join(cache_dir, "default_config.yaml")
default_yaml_config_file = os.path.join(cache_dir, "default_config.yaml")
default_config_file = (
    default_yaml_config_file if os.path.isfile(default_yaml_config_file) else default_json_config_file
)


def load_config_from_file(config_file: str | None) -> Any:
    """What the file says; default: `default_config_file`.

    Raises:
        FileNotFoundError: it was named, and is not there.
    """
    if config_file is not None and not os.path.isfile(config_file):
        raise FileNotFoundError(
            f"The passed configuration file `{config_file}` does not exist. Please pass an existing file."
        )
    text = Path(config_file or default_config_file).read_text(encoding="utf-8")
    found = json.loads(text) if str(config_file).endswith(".json") else yaml.safe_load(text)
    said = SimpleNamespace(**found)
    said.to_dict = lambda: dict(found)
    return said


__getattr__ = unserved(__name__)
