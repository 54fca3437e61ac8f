"""The class that a card names as `launch`, and hooks that stand where nobody asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accel_core.contract import hooks
from accel_core.contract.config import RunConfig
from accel_core.contract.hooks import implements
from accel_core.contract.world import World
from accel_core.errors import PluginError
from accel_core.plugins.binding import Binder
from accel_core.plugins.discovery import Record, environment_of, visible_devices


@pytest.fixture
def pony(toy_plugin: Callable[..., Record]) -> Callable[[str], Record]:
    """`pony(body)` installs a device whose launch class has this body."""

    def install(body: str) -> Record:
        source = (
            "from accel_core import Card, hooks, implements\n"
            f"class Launch:\n    {body}\n"
            "CARD = Card(name='pony', slot='device', summary='A toy.', api_version='1.0',"
            " launch='toy_pony:Launch')\n"
        )
        return toy_plugin("pony", "device", source=source)

    return install


@pytest.mark.parametrize("mark", ["", "@implements(hooks.launch_environment)\n    "])
def test_a_launch_class_may_leave_out_parameters_as_any_plugin(pony, mark):
    record = pony(f"{mark}def launch_environment(self, config): return {{'PONY': str(config.device)}}")

    assert environment_of(record, RunConfig(), World()) == {"PONY": "auto"}


def test_a_marked_method_of_a_launch_class_may_have_another_name(pony):
    record = pony("@implements(hooks.visible_devices)\n    def count(self, config): return 'PONY', 3")

    assert visible_devices(record, RunConfig()) == 3


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "launch_environment = visible_devices = None",
        "def launch_environment(self): return None",
    ],
)
def test_a_launch_class_without_a_hook_or_with_none_says_nothing(pony, body):
    record = pony(body)

    assert environment_of(record, RunConfig(), World()) == {}
    assert visible_devices(record, RunConfig()) is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def launch_enviroment(self, config, world): return {}",
            (
                "hook launch_environment: the method launch_enviroment is never called;"
                " write @implements(hooks.launch_environment), or rename it"
            ),
        ),
        (
            "def launch_environment(self, config, word): return {}",
            "hook launch_environment: the spec has no parameter 'word'; did you mean 'world'?",
        ),
        (
            "@implements(hooks.select_device)\n    def select_device(self, world): return None",
            (
                "hook select_device: it would never be called: core asks plugins that take part in a run;"
                " move it there"
            ),
        ),
        (
            "launch_environment = {}",
            "hook launch_environment: it is {}, which cannot be called; make it a method",
        ),
        (
            "def launch_environment(self, config, world): return ['PONY']",
            (
                "hook launch_environment: it gave ['PONY']\n"
                "return a mapping of variables to text, which may be empty"
            ),
        ),
        (
            "def launch_environment(self, config, world): return {'PONY': 1}",
            (
                "hook launch_environment: it gave {'PONY': 1}\n"
                "return a mapping of variables to text, which may be empty"
            ),
        ),
        (
            "def launch_environment(self, config, world): 1 / 0",
            " cannot be asked for launch_environment\nZero",
        ),
        ("def __init__(self): 1 / 0", " cannot be built from toy_pony:Launch\nZeroDivisionError"),
    ],
)
def test_a_wrong_launch_class_is_named_with_what_is_wrong(pony, body, said):
    record = pony(body)

    with pytest.raises(PluginError) as caught:
        environment_of(record, RunConfig(), World())
    assert str(caught.value).startswith("device plugin 'pony' (accel-pony 1.0)")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "answer", ["2", "('PONY',)", "('PONY', -1)", "(None, 2)", "('PONY', '2')", "('PONY', True)"]
)
def test_a_count_of_devices_that_is_none_is_refused(pony, answer):
    record = pony(f"def visible_devices(self, config): return {answer}")

    with pytest.raises(
        PluginError, match=r"hook visible_devices: it gave .*\nreturn the variable that masks"
    ):
        visible_devices(record, RunConfig())


class Environment:
    @implements(hooks.launch_environment)
    def launch_environment(self, config, world): ...


class Launches:
    @implements(hooks.launch)
    def launch(self, job): ...


class Lists:
    @implements(hooks.open_storage)
    def open_storage(self, url): ...


class Steps:
    @implements(hooks.after_step)
    def after_step(self): ...


@pytest.mark.parametrize(
    ("slot", "cls", "home"),
    [
        ("device", Environment, "the class that the card names as `launch`"),
        ("launcher", Environment, "the class that the card names as `launch`"),
        ("strategy", Launches, "launchers"),
        ("tracker", Lists, "stores"),
        ("launcher", Steps, "plugins that take part in a run"),
        ("store", Steps, "plugins that take part in a run"),
        ("store", Launches, "launchers"),
    ],
)
def test_a_hook_that_core_asks_of_others_is_refused_with_who_is_asked(slot, cls, home):
    said = f"it would never be called: core asks {home}; move it there"

    with pytest.raises(PluginError, match=said.replace(".", r"\.")):
        Binder().register(cls(), name="pony", slot=slot)


@pytest.mark.parametrize(("slot", "cls"), [("launcher", Launches), ("store", Lists), ("extension", Steps)])
def test_a_hook_at_its_place_is_taken(slot, cls):
    assert len(Binder().register(cls(), name="pony", slot=slot).methods) == 1
