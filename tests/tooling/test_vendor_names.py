"""Names that are private to the libraries of backends are still there in what is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from checkout import refuse
from private_names import LIBRARIES, lacking, words

pytest.importorskip("torch")


def is_installed(library: str) -> bool:
    spec = find_spec(library)
    return spec is not None and "stand_in" not in str(spec.origin)


@pytest.mark.full
def test_private_names_of_vendors_libraries_are_there() -> None:
    here = {package: library for package, library in LIBRARIES.items() if is_installed(library)}
    if not here:
        pytest.skip("none of these libraries is installed")

    refuse(
        (
            f"{where}: {name}"
            for package, library in here.items()
            for name, where in lacking(package).items()
            if name not in words(library)
        ),
        "a private name that neither torch nor the installed library has: use another",
    )
