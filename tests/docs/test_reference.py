"""What tools/reference.py writes is fresh, and misses nothing."""

from __future__ import annotations

import re
import sys

from snippets import ROOT

import accel_core
from accel_core import CAPABILITIES, Accelerator
from accel_core.config.sections import Sections
from accel_core.contract import hooks
from accel_core.contract.options import options_of
from accel_core.plugins.discovery import discover


def test_hooks_md_the_readmes_diff_and_the_stub_are_fresh(run_command):
    command = [sys.executable, ROOT / "tools" / "reference.py", "--check"]
    result = run_command(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr


def test_hooks_md_has_every_hook_with_its_kind_once():
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    specs = {name: hook.accel_spec for name, hook in vars(hooks).items() if hasattr(hook, "accel_spec")}
    found = re.findall(r"^### (\w+)\n\n\*(\w+)", text, re.MULTILINE)

    assert sorted(found) == sorted((name, spec.kind) for name, spec in specs.items())


def test_hooks_md_lists_the_phases_and_each_capability_word_with_its_promise():
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")

    assert re.findall(r"^- `(\w+)`$", text, re.MULTILINE) == list(hooks.PHASES)
    assert dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", text, re.MULTILINE)) == dict(CAPABILITIES)


def test_reference_md_has_every_exported_name_and_every_member_of_the_accelerator_once():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    titles = re.findall(r"^### ([\w.]+)$", text, re.MULTILINE)
    members = [f"accelerator.{name}" for name in dir(Accelerator) if not name.startswith("_")]

    assert sorted(titles) == sorted([*members, *accel_core.__all__])


def test_reference_md_has_every_option_of_what_is_installed_from_here():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    table = r"^### (\w+) \(accel-[\w-]+\)\n(.*?)(?=^##|\Z)"
    tables = {
        name: set(re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE))
        for name, body in re.findall(table, text, re.MULTILINE | re.DOTALL)
    }
    for section, cls in Sections(discover()).all():
        wanted = set(options_of(cls)) - {"plugins"}
        assert wanted <= set().union(*(tables.get(it.__name__, set()) for it in cls.__mro__)), section
