"""Metadata of the `accelerate` that is served, for `importlib.metadata`."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path


class Metadata(Distribution):
    """A distribution without files."""

    def __init__(self, name: str, version: str) -> None:
        # Libraries read the home page to tell whose `accelerate` it is.
        described = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        described += "Home-page: https://github.com/huggingface/accelerate\n"
        self._files = {"METADATA": described, "top_level.txt": f"{name}\n"}

    def read_text(self, filename: str) -> str | None:
        """Return METADATA, or the name of the package."""
        return self._files.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return a path beside the package."""
        return Path(__file__).parent / path
