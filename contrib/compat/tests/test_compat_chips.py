"""`is_X_available` of chips whose library gives torch its device type when it is imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_compat.environment import libraries

CHIPS = ("mlu", "musa", "npu", "sdaa")
WORKS = """import types, torch
torch.{0} = types.SimpleNamespace(is_available=lambda: {1}, is_bf16_supported=lambda: {2})
"""


def answers(folder: str, chip: str) -> tuple[bool, bool]:
    sys.path.insert(0, folder)
    return getattr(libraries, f"is_{chip}_available")(), libraries.is_bf16_available()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("there", [True, False])
def test_a_chip_is_available_if_its_library_says_so(
    tmp_path: Path, chip: str, there: bool, run_processes
) -> None:
    (tmp_path / f"torch_{chip}.py").write_text(WORKS.format(chip, there, True))

    assert run_processes(answers, str(tmp_path), chip, world=1) == [(there, True)]


@pytest.mark.parametrize("chip", CHIPS)
def test_a_library_that_does_not_load_here_means_no(tmp_path: Path, chip: str, run_processes) -> None:
    (tmp_path / f"torch_{chip}.py").write_text("raise RuntimeError('no driver')")

    assert run_processes(answers, str(tmp_path), chip, world=1) == [(False, True)]


def test_bf16_is_what_torch_mlu_says(tmp_path: Path, run_processes) -> None:
    (tmp_path / "torch_mlu.py").write_text(WORKS.format("mlu", True, False))

    assert run_processes(answers, str(tmp_path), "mlu", world=1) == [(True, False)]
