"""Names that core keeps for itself, and what reading nothing costs."""

from __future__ import annotations

import sys

import pytest
import yaml
from attrs import fields

from accel_core import RunConfig
from accel_core.config.convert import scalar
from accel_core.contract.card import RESERVED_NAMES


def test_no_plugin_may_be_named_like_an_option_or_section_of_core():
    options = {field.name.replace("_", "-") for field in fields(RunConfig)}
    assert options | {"all", "auto", "config", "env", "no", "plugins", "schema"} == RESERVED_NAMES


def test_where_nothing_is_given_nothing_is_imported_to_read_it(tmp_path, run_command):
    code = (
        "import sys; from accel_core.config.resolve import load;"
        "from accel_core.plugins.discovery import discover;"
        "known = discover(); found = load(discovery=known, environment={});"
        "found.with_proposals({'single': known.get('single')});"
        "print(sorted({'cattrs', 'torch', 'yaml'} & set(sys.modules)))"
    )
    done = run_command([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.full
def test_the_import_takes_no_library_that_only_some_runs_need(run_command):
    pytest.importorskip("torch")
    code = (
        "import sys, torch; before = {*sys.modules}; from accel_core import Accelerator;"
        "print(sorted({'cattrs', 'click', 'rich', 'safetensors', 'xxhash', 'yaml'}"
        " & (set(sys.modules) - before)))"
    )
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_words_and_numbers_of_flags_are_read_without_pyyaml(tmp_path, run_command):
    code = (
        "import sys; from accel_core.config.resolve import load;"
        "from accel_core.plugins.discovery import discover;"
        "found = load(discovery=discover(), flags=[('device', 'cpu'), ('gradient-accumulation-steps', '8')],"
        " environment={});"
        "print(found.config.device, found.config.gradient_accumulation_steps, 'yaml' in sys.modules)"
    )
    done = run_command([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu 8 False\n"


@pytest.mark.parametrize(
    "text", ["cpu", "no", "On", "null", "y", "bf16", "_", "8", "0", "08", "1_0", "9" * 30, "\u0663", "-1.5"]
)
def test_a_word_or_number_is_read_as_yaml_reads_it(text):
    found, expected = scalar(text), yaml.safe_load(text)
    assert (type(found), found) == (type(expected), expected)
