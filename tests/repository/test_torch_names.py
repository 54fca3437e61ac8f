"""Each release of torch on record has the names that the sources use, and takes their arguments."""

from __future__ import annotations

import sys

import pytest
from checkout import ROOT, refuse, tool


def test_older_releases_have_all_that_the_sources_use() -> None:
    names = tool("torch_names")
    refuse(
        names.problems(names.read_sources(), names.read_record()),
        "a name that a release of torch lacks: do without it there, and say so under `guarded` of the record",
    )


@pytest.mark.full
def test_the_installed_torch_has_it_too_and_is_as_recorded(run_command) -> None:
    command = [sys.executable, ROOT / "tools" / "torch_names.py", "--check"]
    ran = run_command(command, capture_output=True, text=True, check=False)

    refuse(
        [ran.stdout + ran.stderr] * bool(ran.returncode),
        "the installed torch is not as recorded: use another name, or run python tools/torch_names.py",
    )


def test_every_release_from_the_oldest_to_the_newest_is_on_record() -> None:
    minors = [int(release.removeprefix("2.")) for release in tool("torch_names").read_record()["newer"]]
    assert minors == list(range(8, 13))
