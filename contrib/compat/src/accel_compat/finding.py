"""`import accelerate`, and its distribution's metadata, answered from `accel_compat.surface`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Final

from accel_core import AccelError

__all__ = ["METADATA", "NAME", "VERSION", "become", "install"]

NAME: Final = "accelerate"
VERSION: Final = "1.15.0"
"""What programs are told: the release whose names, arguments and behaviour are served."""

METADATA: Final = f"""\
Metadata-Version: 2.1
Name: {NAME}
Version: {VERSION}
Home-page: https://github.com/huggingface/accelerate
"""  # libraries look at the page to know whose `accelerate` it is
SURFACE: Final = Path(__file__).parent / "surface"


def install() -> None:
    """Let `accelerate` be ours from now on, in this process. Idempotent.

    Call it before anything imports accelerate. What is installed on disk stays as it is.

    Raises:
        AccelError: another accelerate is imported already.
    """
    other = sys.modules.get(NAME)
    if other is not None and not _is_ours(other):
        raise AccelError(
            f"accel_compat.install() came too late: {NAME} is imported already, from {other.__file__}\n"
            "call it first in the program, or start it by `accel compat launch`"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_ours(module: ModuleType) -> bool:
    return Path(module.__file__ or "").parent == SURFACE


def become(module: ModuleType) -> None:
    """Let a module called `accelerate` that Python found elsewhere be ours; what a shim's folder holds."""
    file = str(SURFACE / "__init__.py")
    module.__file__, module.__path__ = file, [str(SURFACE)]
    SourceFileLoader(NAME, file).exec_module(module)


class _Finder(DistributionFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, *rest = fullname.split(".")
        if head != NAME:
            return None
        place = SURFACE.joinpath(*rest)
        if (place / "__init__.py").is_file():
            return spec_from_file_location(
                fullname, place / "__init__.py", submodule_search_locations=[str(place)]
            )
        file = place.with_suffix(".py")
        return spec_from_file_location(fullname, file) if rest and file.is_file() else None

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008  as it is declared
    ) -> Iterable[Distribution]:
        if context.name in (None, NAME):
            yield _Metadata()


class _Metadata(Distribution):
    def read_text(self, filename: str) -> str | None:
        return {"METADATA": METADATA, "top_level.txt": f"{NAME}\n"}.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return SURFACE.parent / path
