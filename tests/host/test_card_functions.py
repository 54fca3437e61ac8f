"""The functions that a card names for the launcher."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accel_core.contract.config import RunConfig
from accel_core.contract.world import World
from accel_core.errors import PluginError
from accel_core.plugins.discovery import Record, environment_of, visible_devices


@pytest.fixture
def pony(toy_plugin: Callable[..., Record]) -> Callable[[str], Record]:
    """`pony(source)` installs a device whose card names functions of this source."""

    def install(functions: str) -> Record:
        fields = ("launch_environment", "visible_devices")
        named = {name: f"toy_pony:{name}" for name in fields if name in functions}
        source = (
            f"from accel_core import Card\n{functions}\n"
            f"CARD = Card(name='pony', slot='device', summary='A toy.', api_version='1.0', **{named})\n"
        )
        return toy_plugin("pony", "device", source=source)

    return install


def test_a_device_says_what_its_library_reads_and_how_many_devices_there_are(pony):
    record = pony(
        "def launch_environment(config, world): return {'PONY': f'{config.device} {world.size}'}\n"
        "def visible_devices(config): return 3"
    )

    assert environment_of(record, RunConfig(), World()) == {"PONY": "auto 1"}
    assert visible_devices(record, RunConfig()) == 3


def test_a_device_may_leave_both_out(pony):
    record = pony("")

    assert environment_of(record, RunConfig(), World()) == {}
    assert visible_devices(record, RunConfig()) is None


def test_a_device_may_be_unable_to_count(pony):
    assert visible_devices(pony("def visible_devices(config): return None"), RunConfig()) is None


def test_a_function_that_fails_is_named_with_its_plugin(pony):
    record = pony("def launch_environment(config, world): 1 / 0")

    said = r"device plugin 'pony' .* cannot be asked for launch_environment\nZeroDivisionError"
    with pytest.raises(PluginError, match=said):
        environment_of(record, RunConfig(), World())
