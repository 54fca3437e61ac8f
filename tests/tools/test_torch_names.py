"""The tool that compares the sources with releases of torch says what each release lacks."""

from __future__ import annotations

from typing import Any

import pytest
from checkout import tool

OLD = "1.0"


def record(**changed: Any) -> dict[str, Any]:
    names = {"torch": [], "torch.add": ["input, other, *, out=...", "x"], "torch.gone": None, "torch.cat": []}
    known = {name: {OLD: signatures} for name, signatures in names.items()}
    return {"guarded": {}, "newer": {OLD: "brand_new fresh"}, "names": known, **changed}


def found(source: str, **changed: Any) -> list[str]:
    return tool("torch_names").problems({"a.py": source}, record(**changed))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.add(1, other=2, out=3)",
        "import torch as t\nt.add(*(1, 2))\nt.add(**{})\nt.add(4)",
        "from torch import cat\ncat(1, 2, anything=3)",
        "import torch.npu\ntorch.npu.anything()",
        "class A:\n    fresh = 1\nA().fresh",
    ],
)
def test_what_an_older_release_has_is_fine(source: str) -> None:
    assert found(source) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\ntorch.gone", "a.py:2: torch.gone is not there in torch 1.0"),
        (
            "def f():\n    from torch import gone as x\n    x()",
            "a.py:3: torch.gone is not there in torch 1.0",
        ),
        ("import torch\nx = torch.gone.inner", "a.py:2: torch.gone.inner is not recorded"),
        ("import torch\ntorch.add(1, 2, dim=0)", "a.py:2: torch.add (got an unexpected keyword argument"),
        ("import torch\ntorch.add(1, 2, 3)", "a.py:2: torch.add (too many positional arguments) is called"),
        ("x = 1\nx.brand_new()", "a.py:2: brand_new is a member that torch 1.0 has not"),
        ("def f(x):\n    x(fresh=1)", "a.py:2: fresh is a member that torch 1.0 has not"),
    ],
)
def test_what_an_older_release_lacks_is_found(source: str, said: str) -> None:
    assert any(text.startswith(said) for text in found(source)), found(source)


def test_a_name_on_record_for_an_older_release_alone_counts_for_the_next_one() -> None:
    assert found("import torch\ntorch.add(1, 2, dim=0)", newer={OLD: "", "1.1": ""}) == [
        f"a.py:2: torch.add (got an unexpected keyword argument 'dim') is called otherwise in torch {release}"
        for release in (OLD, "1.1")
    ]


def test_what_the_sources_do_without_is_declared() -> None:
    source = "import torch\nif hasattr(torch, 'gone'):\n    torch.gone.brand_new()"
    names = {**record()["names"], "torch.gone.brand_new": {OLD: None}}
    guarded = {"torch.gone.brand_new": "hasattr", "brand_new": "hasattr"}

    assert found(source, names=names) != []
    assert found(source, names=names, guarded=guarded) == []


def test_a_declaration_that_is_not_needed_any_more_is_found() -> None:
    assert found("import torch", guarded={"torch.gone": "hasattr"}) == [
        "guarded: torch.gone is lacking nowhere"
    ]
