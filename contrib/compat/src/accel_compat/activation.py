"""`import accelerate` and its metadata, answered from `accel_compat.surface`.

Where ACCEL_COMPAT=1 is set, accel_compat.pth runs `activate` at the start of every Python process of the
environment. So this file imports the standard library only, and the rest when a program imports accelerate.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from importlib.metadata import Distribution

VARIABLE: Final = "ACCEL_COMPAT"
ANNOUNCED: Final = "ACCEL_COMPAT_ANNOUNCED"
NAME: Final = "accelerate"
VERSION: Final = "1.15.0"
"""The release whose names, arguments and behaviour are served."""
SURFACE: Final = os.path.join(os.path.dirname(__file__), "surface")
_PTH: Final = "accel_compat.pth"
_RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def activate() -> None:
    """Answer `import accelerate` from this package, in this process. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def install() -> None:
    """Answer `import accelerate` from this package, in this process and its children. Idempotent.

    Call it before anything imports accelerate. An Accelerate that is installed stays as it is.

    Raises:
        AccelError: another accelerate is imported already.
    """
    other = sys.modules.get(NAME)
    if other is not None and os.path.dirname(other.__file__ or "") != SURFACE:
        from accel_core import AccelError

        raise AccelError(
            f"accel_compat.install() came too late: {NAME} is imported already, from {other.__file__}\n"
            f"call it first in the program, or start the program with {VARIABLE}=1"
        )
    if os.environ.get(VARIABLE) != "1" and (reason := explain_inactive()) is not None:
        sys.stderr.write(f"accel-compat: children of this process do not import its accelerate: {reason}\n")
    os.environ[VARIABLE] = "1"
    activate()


def explain_inactive() -> str | None:
    """Return why new Python processes would not act on ACCEL_COMPAT=1, or None if they do."""
    import site

    if sys.flags.no_site:
        return f"python -S reads no {_PTH}; start Python without -S"
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    if any(os.path.isfile(os.path.join(folder, _PTH)) for folder in folders):
        return None
    return (
        f"{_PTH} is in none of the folders in which Python looks for it at its start ({', '.join(folders)});"
        " install accel-compat by `pip install`, without --target"
    )


def _announce() -> None:
    """Say once per job, on rank 0, who serves `accelerate`."""
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    if rank == "0" and ANNOUNCED not in os.environ:
        sys.stderr.write(f"accel-compat: {NAME} {VERSION} is served by accel-core\n")
        _warn_of_newer()
        os.environ[ANNOUNCED] = "1"  # its children are of the same job


def _warn_of_newer() -> None:
    """Warn where the installed Accelerate is of a later release than the one that is served."""
    from importlib.metadata import distributions

    def minor(version: str) -> list[int]:
        return [int(part) for part in version.split(".")[:2]]

    for installed in distributions(name=NAME, path=sys.path):
        if minor(installed.version) > minor(VERSION):
            sys.stderr.write(
                f"accel-compat: Accelerate {installed.version} is installed, and {VERSION} is the newest"
                " whose names and defaults are served\n"
            )


class _Loader(SourceFileLoader):
    """Loads a file of the surface; the module's other names are looked up when they are asked for."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == NAME:
            _announce()
        super().exec_module(module)
        _add_names(module)


class _EmptyLoader:
    """Makes a module of which nothing is served."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make it."""

    def exec_module(self, module: ModuleType) -> None:
        _add_names(module)


def _add_names(module: ModuleType) -> None:
    from accel_compat.unsupported import names_of

    vars(module).update(names_of(module.__name__))


def _find_test_utils(fullname: str) -> ModuleSpec | None:
    """Find the helpers of Accelerate's own tests where Accelerate is installed: they test ours as well."""
    installed = PathFinder.find_spec(NAME)
    return None if installed is None else PathFinder.find_spec(fullname, installed.submodule_search_locations)


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        head, *rest = fullname.split(".")
        if head != NAME:
            return None
        if rest == ["test_utils"]:
            return _find_test_utils(fullname)
        place = os.path.join(SURFACE, *rest)
        folder = [place] if os.path.isdir(place) else None
        file = os.path.join(place, "__init__.py") if folder else f"{place}.py"
        if os.path.isfile(file):
            loader = _Loader(fullname, file)
            return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folder)
        from accel_compat.unsupported import inventory

        return ModuleSpec(fullname, _EmptyLoader()) if fullname in inventory() else None  # type: ignore[arg-type]

    def find_distributions(self, context: Any) -> Iterable[Distribution]:
        """Answer for `accelerate`, but for installers, which ask for the folders of their own."""
        if context.name in (None, NAME) and "path" not in vars(context):
            from accel_compat.metadata import Metadata

            yield Metadata(NAME, VERSION)
