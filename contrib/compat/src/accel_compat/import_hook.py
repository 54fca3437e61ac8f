"""`import accelerate` and its metadata, answered from `accel_compat.surface`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import spec_from_file_location
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Final

from accel_compat.unsupported import inventory, names_of
from accel_core import AccelError

NAME: Final = "accelerate"
VERSION: Final = "1.15.0"
"""The release whose names, arguments and behaviour are served."""

# Libraries read the home page to tell whose `accelerate` it is.
METADATA: Final = f"""\
Metadata-Version: 2.1
Name: {NAME}
Version: {VERSION}
Home-page: https://github.com/huggingface/accelerate
"""
SURFACE: Final = Path(__file__).parent / "surface"


def install() -> None:
    """Answer `import accelerate` from this package, in this process. Idempotent.

    Call it before anything imports accelerate. What is installed on disk stays as it is.

    Raises:
        AccelError: another accelerate is imported already.
    """
    other = sys.modules.get(NAME)
    if other is not None and Path(other.__file__ or "").parent != SURFACE:
        raise AccelError(
            f"accel_compat.install() came too late: {NAME} is imported already, from {other.__file__}\n"
            "call it first in the program, or start it by `accel compat launch`"
        )
    if not any(isinstance(finder, _DistributionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DistributionFinder())


def replace_module(module: ModuleType) -> None:
    """Turn a module that Python found as `accelerate` into ours, for a shim's folder."""
    file = str(SURFACE / "__init__.py")
    module.__file__, module.__path__ = file, [str(SURFACE)]
    sys.meta_path.insert(0, _MirrorFinder())
    _MirrorLoader(NAME, file).exec_module(module)


class _MirrorLoader(SourceFileLoader):
    """Loader of a file of the mirror.

    `names_of` gives the module the other names of Accelerate's.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(names_of(module.__name__))


class _EmptyLoader(Loader):
    """Makes a module of which nothing is served."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(names_of(module.__name__))


class _MirrorFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, *rest = fullname.split(".")
        if head != NAME:
            return None
        place = SURFACE.joinpath(*rest)
        folder = [str(place)] if place.is_dir() else None
        file = place / "__init__.py" if folder else place.with_suffix(".py")
        if file.is_file():
            loader = _MirrorLoader(fullname, str(file))
            return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folder)
        return ModuleSpec(fullname, _EmptyLoader()) if fullname in inventory() else None


class _DistributionFinder(_MirrorFinder, DistributionFinder):
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
