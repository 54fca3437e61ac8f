"""Names that are private to torch are still there in the torch that is installed."""

from __future__ import annotations

import ast

import pytest
from checkout import packages, refuse
from private_names import LIBRARIES, lacking, names_in, words

pytest.importorskip("torch")


def test_private_names_of_torch_are_there() -> None:
    """Packages that use those of another library too: tests/tooling/test_vendor_names.py."""
    refuse(
        (
            f"{where}: {name}"
            for package in packages().keys() - LIBRARIES.keys()
            for name, where in lacking(package).items()
        ),
        "a private name that the installed torch has not: use another, or do without where it is missing",
    )


def test_a_name_that_is_nowhere_is_found() -> None:
    module = ast.parse("from torch.nn._gone import x\nx._gone_too\nself._mine = x._mine")
    used = {name for name, _, made in names_in(module) if not made}

    assert used - words("torch") == {"_gone", "_gone_too", "_mine"}
