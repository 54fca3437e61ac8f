"""The figures of a run on a real GPU get into the pages, and pages say so while there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

TOOL = ROOT / "tools" / "gpu_figures.py"
PAGES = ("docs/tested.md", "README.md", "benchmarks/README.md", "backends/cuda/README.md")
TABLE = ["| | tokens /s | × by hand |", "|---|---|---|", "| accel-core | 51234.0 | 0.999 |"]


def part(name: str, result: str, detail: str = "", tables: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"name": name, "result": result, "seconds": 1.5, "detail": detail, "tables": [*tables]}


def proof(folder: Path, **about: Any) -> Path:
    found = {
        "device": "NVIDIA H200",
        "torch": "2.11.0+cu130",
        "date": "2026-01-02",
        "parts": [
            part("an epoch equals the plain loop", "ok", "weights differ by 1e-07"),
            part("Llama", "ok", tables=tuple(TABLE)),
            part("float8", "FAILED", "AssertionError: a | b"),
        ],
        **about,
    }
    file = folder / "proof.json"
    file.write_text(json.dumps(found))
    return file


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for page in PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def write(run_command, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return run_command(command, capture_output=True, text=True, timeout=60, check=False)


def texts(checkout: Path) -> dict[str, str]:
    return {page: (checkout / page).read_text() for page in PAGES}


def test_while_there_is_no_run_each_page_says_so(checkout: Path, run_command) -> None:
    before = texts(checkout)

    assert write(run_command, "--root", checkout).returncode == 0

    if not (ROOT / "benchmarks/gpu.json").exists():
        assert texts(checkout) == before
    assert all("**No GPU run yet**" in text for text in texts(checkout).values())


def test_a_run_is_in_each_page_with_its_device_and_its_failures(checkout: Path, run_command) -> None:
    assert write(run_command, "--root", checkout, proof(checkout)).returncode == 0

    found = texts(checkout)
    for text in found.values():
        assert "Seen on one NVIDIA H200 (torch 2.11.0+cu130, 2026-01-02)" in text
        assert "of 3 parts 2 ok, 1 FAILED" in text.replace("\n", " ")
        assert "No GPU run yet" not in text
    assert "| float8 | FAILED | 1.5 | AssertionError: a / b |" in found["docs/tested.md"]
    assert "\n".join(["**Llama**", "", *TABLE]) in found["docs/tested.md"]


def test_what_it_has_written_it_writes_again_without_the_file(checkout: Path, run_command) -> None:
    given = proof(checkout)
    write(run_command, "--root", checkout, given)
    first = texts(checkout)
    given.unlink()

    assert write(run_command, "--root", checkout).returncode == 0

    assert texts(checkout) == first
    assert write(run_command, "--root", checkout, "--check").returncode == 0


def test_several_runs_of_one_device_are_one_proof(checkout: Path, run_command) -> None:
    first, second = checkout / "first", checkout / "second"
    for folder in (first, second):
        folder.mkdir()
    begun = proof(first, parts=[part("Llama", "out of time"), part("a step", "ok")])
    later = proof(second, parts=[part("Llama", "ok", tables=tuple(TABLE)), part("a step", "out of time")])

    assert write(run_command, "--root", checkout, begun, later).returncode == 0

    assert "of 2 parts 2 ok" in texts(checkout)["README.md"].replace("\n", " ")


def test_runs_of_two_devices_follow_each_other(checkout: Path, run_command) -> None:
    other = checkout / "other"
    other.mkdir()

    given = proof(checkout), proof(other, device="NVIDIA A100", parts=[part("Llama", "ok")])
    assert write(run_command, "--root", checkout, *given).returncode == 0

    for text in texts(checkout).values():
        words = text.replace("\n", " ")
        assert words.index("NVIDIA H200") < words.index("of 3 parts") < words.index("NVIDIA A100")
        assert words.index("NVIDIA A100") < words.index("of 1 parts 1 ok")
    assert write(run_command, "--root", checkout, "--check").returncode == 0


def test_a_page_that_was_edited_is_stale(checkout: Path, run_command) -> None:
    write(run_command, "--root", checkout, proof(checkout))
    page = checkout / "README.md"
    page.write_text(page.read_text().replace("NVIDIA H200", "NVIDIA H300"))

    checked = write(run_command, "--root", checkout, "--check")

    assert checked.returncode == 1
    assert "README.md is stale" in checked.stdout


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"device": "cpu"}, "rehearsal on 'cpu'"),
        ({"parts": []}, "no whole parts"),
        ({"parts": [{}]}, "is no proof.json"),
        ({"torch": None}, "no whole parts"),
        ({"parts": [part("Llama", "ok") | {"tables": "| a |"}]}, "no whole parts"),
        ({"parts": [part("Llama", "ok", "a\nb")]}, "no whole parts"),
        ({"parts": [part("Llama", "ok", "<!-- /gpu -->")]}, "ends the figures of a page"),
        ({"parts": [part("Llama", "out of time"), part("float8", "not here")]}, "of 2 parts none ran"),
    ],
)
def test_what_shows_nothing_of_a_gpu_is_refused(
    checkout: Path, about: dict[str, Any], words: str, run_command
) -> None:
    before = texts(checkout)

    refused = write(run_command, "--root", checkout, proof(checkout, **about))

    assert refused.returncode == 1
    assert words in refused.stderr
    assert texts(checkout) == before
