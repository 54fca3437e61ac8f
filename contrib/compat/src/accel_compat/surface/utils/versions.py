"""Comparing versions of installed distributions."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version, parse

from .constants import STR_OPERATION_TO_FUNC

__all__ = ["compare_versions", "is_torch_version"]


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a version, or that of an installed distribution, compares so to another."""
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation {operation!r} is none of {', '.join(STR_OPERATION_TO_FUNC)}")
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version compares so to another."""
    import torch

    return compare_versions(parse(torch.__version__), operation, version)
