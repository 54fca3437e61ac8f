"""What tools/reference.py writes is fresh, and misses nothing."""

from __future__ import annotations

import re
import subprocess
import sys

from snippets import ROOT

from accel_core import CAPABILITIES, hookspecs


def test_hooks_md_and_the_readmes_diff_are_fresh():
    command = [sys.executable, ROOT / "tools" / "reference.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


def test_hooks_md_has_every_hook_with_its_kind_once():
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    specs = {name: hook.accel_spec for name, hook in vars(hookspecs).items() if hasattr(hook, "accel_spec")}
    found = re.findall(r"^### (\w+)\n\n\*(\w+)", text, re.MULTILINE)

    assert sorted(found) == sorted((name, spec.kind) for name, spec in specs.items())


def test_hooks_md_lists_the_phases_and_each_capability_word_with_its_promise():
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")

    assert re.findall(r"^- `(\w+)`$", text, re.MULTILINE) == list(hookspecs.PHASES)
    assert dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", text, re.MULTILINE)) == dict(CAPABILITIES)
