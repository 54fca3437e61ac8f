"""Names that core keeps for itself."""

from __future__ import annotations

from attrs import fields

from accel_core import RunConfig
from accel_core.config.options import RESERVED_NAMES


def test_no_plugin_may_be_named_like_an_option_or_section_of_core():
    options = {field.name.replace("_", "-") for field in fields(RunConfig)}
    assert options | {"auto", "config", "env", "no", "plugins", "schema"} == RESERVED_NAMES
