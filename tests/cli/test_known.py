"""known.yaml: words of others, and the plugins of this repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accel_core.known import known_plugins, old_flag

GENERATOR = Path(__file__).parents[2] / "tools" / "known.py"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the generator reads TOML with the standard library")
def test_it_lists_the_workspaces_plugins_as_they_are():
    ended = subprocess.run(
        [sys.executable, GENERATOR, "--check"], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_each_known_plugin_has_the_distribution_to_install():
    assert known_plugins()
    assert all(plugin.distribution.startswith("accel-") for plugin in known_plugins())


def test_spellings_with_underscores_are_the_same_flag():
    assert old_flag("--num_processes") == old_flag("--num-processes")


def test_families_of_flags_are_known_by_their_prefix():
    family = old_flag("--fsdp_anything_at_all")

    assert family is not None
    assert "--strategy fsdp" in family


def test_what_nobody_had_is_not_known():
    assert old_flag("--pony") is None
