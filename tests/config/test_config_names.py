"""Names that core keeps for itself, and what reading nothing costs."""

from __future__ import annotations

import subprocess
import sys

from attrs import fields

from accel_core import RunConfig
from accel_core.contract.card import RESERVED_NAMES


def test_no_plugin_may_be_named_like_an_option_or_section_of_core():
    options = {field.name.replace("_", "-") for field in fields(RunConfig)}
    assert options | {"all", "auto", "config", "env", "no", "plugins", "schema"} == RESERVED_NAMES


def test_where_nothing_is_given_nothing_is_imported_to_read_it(tmp_path):
    code = (
        "import sys; from accel_core.config.resolve import load;"
        "from accel_core.plugins.discovery import discover;"
        "found = load(discovery=discover(), environment={}); found.with_proposals(['single']);"
        "print(sorted({'cattrs', 'torch', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
