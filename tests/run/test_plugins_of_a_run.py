"""What a run does with plugins: when it imports them, what it sets, which claims it refuses."""

from __future__ import annotations

import os

import pytest
import torch

from accel_core import Accelerator, ConfigError, PluginError

EXTENSION = """
from accel_core import Card, hooks, implements

def launch_environment(config, world):
    return {{"TOY_MODE": "fast"}}

class Plugin:
    def __init__(self, config, run):
        self.run = run

    @implements(hooks.refuse)
    def refuse(self, config):
        return {refuses}

    @implements(hooks.after_step)
    def after_step(self, unit, optimizer, applied):
        unit.run.applied = applied

CARD = Card(name="{name}", slot="extension", summary="A toy.", api_version="1.0",
            launch_environment="toy_{name}:launch_environment", implementation="toy_{name}:Plugin")
"""


def extension(name, refuses=()):
    return EXTENSION.format(name=name, refuses=repr(list(refuses)))


@pytest.fixture
def run_with(toy_plugin, monkeypatch):
    made = []

    def make(**sources):
        for name, source in sources.items():
            toy_plugin(name, "extension", source=source)
        monkeypatch.setenv("ACCEL__EXTENSIONS", ",".join(sources))
        made.append(Accelerator(cpu=True))
        return made[-1]

    yield make
    for accelerator in made:
        accelerator.end_training()


VERIFIED = """
from accel_core import Card

def verify():
    {verify}

CARD = Card(name="one", slot="extension", summary="A toy.", api_version="1.0",
            verify="toy_one:verify", implementation="toy_one:verify")
"""


@pytest.mark.parametrize(
    ("verify", "said"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import no_such_library", "No module named 'no_such_library'"),
    ],
)
def test_a_library_that_quits_when_it_is_first_asked_does_not_end_the_run_in_silence(run_with, verify, said):
    with pytest.raises(PluginError, match=rf"cannot be asked for verify\n.*{said}"):
        run_with(one=VERIFIED.format(verify=verify))


def test_every_reason_to_refuse_a_config_is_told(run_with):
    with pytest.raises(ConfigError, match="refuses this config\nno luck today\nnor tomorrow"):
        run_with(one=extension("one", refuses=["no luck today", "nor tomorrow"]))


def test_a_per_step_hook_of_an_extension_is_called(run_with):
    accelerator = run_with(one=extension("one"))
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert accelerator.run.applied is True


def test_what_the_vendor_reads_at_import_is_set_before_it(run_with, monkeypatch):
    monkeypatch.delenv("TOY_MODE", raising=False)
    run_with(one="import os\nSEEN = []\n" + extension("one") + "\n")
    assert os.environ.pop("TOY_MODE") == "fast"


def test_the_users_own_variable_wins_and_is_told(run_with, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "slow")
    accelerator = run_with(one=extension("one"))
    assert os.environ["TOY_MODE"] == "slow"
    assert "TOY_MODE=slow is yours; one would have set fast" in accelerator.explain()


def test_a_variable_that_the_launcher_guessed_gives_way_to_what_the_run_asks_for(run_with, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "slow")
    monkeypatch.setenv("ACCEL_LAUNCH_VARIABLES", '{"TOY_MODE": "slow"}')
    accelerator = run_with(one=extension("one"))
    assert os.environ["TOY_MODE"] == "fast"
    assert "TOY_MODE" not in accelerator.explain()


def test_a_variable_that_the_script_set_over_the_launchers_wins(run_with, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "exact")
    monkeypatch.setenv("ACCEL_LAUNCH_VARIABLES", '{"TOY_MODE": "slow"}')
    accelerator = run_with(one=extension("one"))
    assert "TOY_MODE=exact is yours; one would have set fast" in accelerator.explain()


@pytest.mark.parametrize(
    "fault", ["raise RuntimeError('no driver')", "import sys; sys.exit(3)", "import nowhere"]
)
def test_a_chosen_plugin_whose_import_fails_is_named_with_the_cause(run_with, fault):
    source = extension("one").replace('implementation="toy_one:Plugin"', 'implementation="toy_broken:Plugin"')
    with pytest.raises(
        PluginError, match=r"extension plugin 'one' \(accel-one 1.0\) cannot be imported from toy_br"
    ):
        run_with(one=source)


def test_a_plugin_nobody_chose_harms_nobody(toy_plugin):
    toy_plugin("broken", "device", source="raise SystemExit(7)")
    accelerator = Accelerator(cpu=True)
    assert [chosen.name for chosen in accelerator.run.stack.members()] == ["native", "fp32", "single"]
    accelerator.end_training()


def test_a_misspelt_hook_is_refused_with_the_nearest(run_with):
    source = extension("one").replace("hooks.after_step", "hooks.after_stp")
    with pytest.raises(PluginError, match="has no attribute 'after_stp'; did you mean 'after_step'"):
        run_with(one=source)


DECLARES = """
from accel_core import Card
from accel_core.contract.spec import spec

@spec("everyone")
def reading(step): ...

class Plugin:
    def __init__(self, config, run):
        self.run = run

CARD = Card(name="gauge", slot="extension", summary="A toy.", api_version="1.0",
            hookspecs="toy_gauge", implementation="toy_gauge:Plugin")
"""


@pytest.mark.parametrize("order", [["gauge", "sensor"], ["sensor", "gauge"]])
def test_a_hook_that_a_package_of_the_run_does_not_have_is_refused_with_the_nearest(run_with, order):
    sensor = extension("sensor").replace("hooks.after_step", '"gauge.readings"')
    sources = {"gauge": DECLARES, "sensor": sensor}
    said = (
        r"plugin 'sensor' implements 'gauge.readings', a hook that gauge \(accel-gauge .*\) does not have;"
        r" did you mean 'gauge.reading'\?\nits hooks are: gauge.reading"
    )
    with pytest.raises(PluginError, match=said):
        run_with(**{name: sources[name] for name in order})


def test_a_hook_of_a_package_that_is_not_in_the_run_is_no_mistake(run_with):
    run_with(sensor=extension("sensor").replace("hooks.after_step", '"gauge.readings"'))


def test_a_module_of_hooks_without_one_is_named_with_its_plugin(run_with):
    with pytest.raises(PluginError, match=r"plugin 'gauge': module toy_gauge, .* declares no hook"):
        run_with(gauge=DECLARES.replace('@spec("everyone")', ""))


def test_a_hook_of_an_unknown_kind_is_named_with_its_plugin(run_with):
    with pytest.raises(
        PluginError, match=r"gauge .*: spec of hook reading: 'evryone' is not a kind of hook; did you"
    ):
        run_with(gauge=DECLARES.replace("everyone", "evryone"))


def test_a_hook_with_an_unknown_argument_is_refused(run_with):
    source = extension("one").replace("unit, optimizer, applied", "unit, optimiser, applied")
    with pytest.raises(PluginError, match=r"hook 'after_step'(.|\n)*optimiser"):
        run_with(one=source)


def test_what_runs_have_set_is_taken_back_when_the_last_of_them_ends(run_with, monkeypatch):
    monkeypatch.delenv("TOY_MODE", raising=False)
    first, second = run_with(one=extension("one")), Accelerator(cpu=True)
    first.end_training()
    between = os.environ.get("TOY_MODE")
    second.end_training()

    assert (between, os.environ.get("TOY_MODE")) == ("fast", None)


def test_a_run_that_cannot_be_made_leaves_no_environment(run_with, monkeypatch):
    monkeypatch.delenv("TOY_MODE", raising=False)
    with pytest.raises(ConfigError):
        run_with(one=extension("one", refuses=["no"]))

    assert "TOY_MODE" not in os.environ
