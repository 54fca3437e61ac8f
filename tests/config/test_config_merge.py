"""defaults < presets < file < environment < flags < Python, value by value; each names its origin."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import yaml
from config_toys import TOYS, ShardConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_core import ConfigError, GradientAccumulationPlugin, GradScalerKwargs, RunConfig
from accel_core.config.convert import convert
from accel_core.config.resolve import load
from accel_core.contract.options import options_of

OPTIONS = {
    "device": st.sampled_from(["cpu", "toy", "no", "3"]),
    "gradient_accumulation_steps": st.integers(1, 99),
    "device_placement": st.booleans(),
    "rng_types": st.lists(st.sampled_from(["generator", "torch"]), min_size=1, max_size=2),
    "launch.rendezvous": st.sampled_from([None, "node:29500"]),
    "launch.processes_per_node": st.just("auto") | st.integers(1, 8),
    "grad_scaler.init_scale": st.floats(1, 1e6),
    "process_group.timeout": st.none() | st.integers(1, 10**6),
    "shard.cpu_offload": st.booleans(),
    "shard.policy.min_size": st.integers(0, 9),
}
some = st.fixed_dictionaries({}, optional=OPTIONS)


def nested(values):
    tree = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def text(value):
    return value if isinstance(value, str) else json.dumps(value)


def typed(path, value):
    cls = ShardConfig if path.startswith("shard") else RunConfig
    *sections, name = path.removeprefix("shard.").split(".")
    for section in sections:
        cls = options_of(cls)[section].section
    return convert(value, options_of(cls)[name].kind)


@settings(max_examples=40, deadline=None)
@given(file=some, environment=some, flags=some)
def test_the_strongest_source_that_gives_a_value_wins(file, environment, flags):
    with tempfile.TemporaryDirectory() as folder:
        if file:
            Path(folder, "accel.yaml").write_text(yaml.safe_dump(nested(file)), encoding="utf-8")
        variables = {"ACCEL__" + path.replace(".", "__").upper(): text(v) for path, v in environment.items()}
        dotted = {path.replace("_", "-"): text(value) for path, value in flags.items()}
        found = load(flags=dotted.items(), discovery=TOYS, environment=variables, directory=folder)
    expected = {path: typed(path, value) for path, value in (file | environment | flags).items()}
    values = {".".join(path): setting for path, setting in found.settings.items()}
    values.pop("accumulation.num_steps", None)  # a second name of gradient_accumulation_steps
    assert {name: setting.value for name, setting in values.items()} == expected
    for name, setting in values.items():
        assert setting.origin.source == (
            "flag" if name in flags else "environment" if name in environment else "file"
        )


@settings(max_examples=40, deadline=None)
@given(file=some, flags=some)
def test_a_worker_reads_from_the_handover_what_the_launcher_read(file, flags):
    with tempfile.TemporaryDirectory() as folder:
        if file:
            Path(folder, "accel.yaml").write_text(yaml.safe_dump(nested(file)), encoding="utf-8")
        dotted = {path: text(value) for path, value in flags.items()}
        launcher = load(flags=dotted.items(), discovery=TOYS, environment={}, directory=folder)
        variables = {"ACCEL_LAUNCH_CONFIG": launcher.worker_config()}
        worker = load(discovery=TOYS, environment=variables, directory=folder)
    assert worker.config == launcher.config
    assert worker.origins == launcher.origins
    assert worker.tree == launcher.tree


def test_a_value_names_its_origin_and_what_it_won_over(resolve):
    found = resolve("device: cpu\nmixed_precision: fp16\n", flags={"mixed-precision": "bf16"})
    assert found.origins == {
        "device": "accel.yaml:1:1",
        "mixed_precision": "flag --mixed-precision (over 'fp16' from accel.yaml:2:1)",
    }


def test_python_wins_over_the_file_and_says_so(resolve):
    found = resolve("mixed_precision: fp16\n", python={"mixed_precision": "bf16"})
    assert found.config.mixed_precision == "bf16"
    assert (
        found.origins["mixed_precision"]
        == "Accelerator(mixed_precision=...) (over 'fp16' from accel.yaml:1:1)"
    )


@pytest.mark.parametrize(
    ("outside", "origin"),
    [
        ({"flags": {"device-placement": "false"}}, "flag --device-placement"),
        ({"ACCEL__DEVICE_PLACEMENT": "false"}, "variable ACCEL__DEVICE_PLACEMENT"),
    ],
)
def test_python_contradicting_a_flag_or_the_environment_is_an_error_naming_both(resolve, outside, origin):
    with pytest.raises(ConfigError) as caught:
        resolve(python={"device_placement": True}, **outside)
    (line,) = caught.value.problems
    assert line.endswith(f"device_placement: True here, but False by {origin}; give it once")


def test_python_agreeing_with_a_flag_is_no_error(resolve):
    assert resolve(python={"launch.nodes": 2}, flags={"launch.nodes": "2"}).config.launch.nodes == 2


def test_python_contradicting_a_flag_of_the_launcher_is_an_error_in_the_worker_too(resolve):
    handover = resolve(flags={"device": "cpu"}).worker_config()
    with pytest.raises(ConfigError, match="device: 'toy' here, but 'cpu' by flag --device"):
        resolve(python={"device": "toy"}, ACCEL_LAUNCH_CONFIG=handover)


def test_in_a_worker_file_environment_and_flags_are_those_of_the_launcher(resolve):
    outer = resolve("device: cpu\n", ACCEL__MIXED_PRECISION="bf16")
    handover = outer.worker_config()
    inherited = {"ACCEL__MIXED_PRECISION": "bf16", "ACCEL_LAUNCH_CONFIG": handover}
    worker = resolve("device: other\n", **inherited)
    assert (worker.config.device, worker.config.mixed_precision, worker.file) == ("cpu", "bf16", "accel.yaml")


def test_a_variable_that_a_script_sets_counts_in_a_worker_as_under_plain_python(resolve):
    outer = resolve("device: toy\n", flags={"launch.nodes": "2"}, ACCEL__MIXED_PRECISION="bf16")
    handover = outer.worker_config()
    script = {"ACCEL__MIXED_PRECISION": "no", "ACCEL__DEVICE": "cpu", "ACCEL__LAUNCH__NODES": "7"}
    worker = resolve(ACCEL_LAUNCH_CONFIG=handover, **script)
    assert (worker.config.mixed_precision, worker.config.device, worker.config.launch.nodes) == (
        "no",
        "cpu",
        2,
    )
    assert worker.origins["device"] == "variable ACCEL__DEVICE (over 'toy' from accel.yaml:1:1)"


def test_accel_config_names_the_file(resolve, tmp_path):
    (tmp_path / "other.yaml").write_text("device: cpu\n", encoding="utf-8")
    found = resolve("device: toy\n", ACCEL_CONFIG="other.yaml")
    assert (found.config.device, found.file) == ("cpu", "other.yaml")


def test_no_file_is_no_error(resolve):
    assert resolve().file is None
    assert resolve().config == RunConfig()


def test_variables_of_others_are_not_ours(resolve):
    assert resolve(ACCELERATE_MIXED_PRECISION="bf16", ACCEL_DEBUG="1").config == RunConfig()


def test_an_empty_variable_is_not_given(resolve):
    assert resolve("device: cpu\n", ACCEL__DEVICE="").config.device == "cpu"


def test_an_unknown_variable_is_an_error_with_near_names(resolve):
    with pytest.raises(
        ConfigError, match=r"variable ACCEL__LAUNCH__NODE: launch.node: unknown key; did you mean 'nodes'"
    ):
        resolve(ACCEL__LAUNCH__NODE="2")


@pytest.mark.parametrize(
    ("text", "variables", "origin"),
    [(None, {"ACCEL__": "3"}, "variable ACCEL__"), ('"": 3\n', {}, "accel.yaml:1:1")],
)
def test_a_value_without_a_name_is_said_to_be_one(resolve, text, variables, origin):
    with pytest.raises(ConfigError, match=f"^{origin}: names no option; `accel config show` lists them"):
        resolve(*filter(None, [text]), **variables)


def test_a_plugin_with_hyphens_is_spelt_with_underscores_in_variables(resolve):
    found = resolve(ACCEL__RIVAL_ONE__LEVEL="2")
    assert found.config.plugins["rival-one"].level == 2
    assert found.origins == {"rival-one.level": "variable ACCEL__RIVAL_ONE__LEVEL"}


def test_a_variable_may_hold_a_whole_section(resolve):
    found = resolve(ACCEL__SHARD="{stage: 3, policy: {min_size: 4}}")
    assert found.origins == {
        "shard.stage": "variable ACCEL__SHARD",
        "shard.policy.min_size": "variable ACCEL__SHARD",
    }


def test_a_variable_cannot_reach_into_an_option_that_holds_a_mapping(resolve):
    with pytest.raises(ConfigError, match=r"shard.extra: has no keys of its own; give it whole"):
        resolve(ACCEL__SHARD__EXTRA__A="1")


def test_one_file_may_not_give_accumulation_two_values_by_its_two_names(resolve):
    yaml_text = "gradient_accumulation_steps: 4\naccumulation: {num_steps: "
    assert resolve(yaml_text + "4}\n").config.accumulation_steps == 4
    with pytest.raises(
        ConfigError, match=r"accel.yaml:2:16: .*: 2 here, but 4 by accel.yaml:1:1; give it once"
    ):
        resolve(yaml_text + "2}\n")


@pytest.mark.parametrize(
    "stronger",
    [
        {"flags": {"accumulation.num-steps": "4"}},
        {"ACCEL__ACCUMULATION__NUM_STEPS": "4"},
        {"objects": [GradientAccumulationPlugin(num_steps=4)]},
        {"python": {"gradient_accumulation_steps": 4}},
    ],
)
def test_accumulation_wins_over_a_file_that_used_its_other_name(resolve, stronger):
    for weaker in ("gradient_accumulation_steps: 1\n", "accumulation: {num_steps: 1}\n"):
        config = resolve(weaker, **stronger).config
        assert (config.accumulation_steps, config.accumulation.num_steps) == (4, 4)


def test_accumulation_is_one_value_wherever_it_was_set(resolve):
    assert resolve().config.accumulation_steps == 1
    assert resolve("accumulation: {num_steps: 3}\n").config.accumulation_steps == 3
    assert resolve("gradient_accumulation_steps: 3\n").config.accumulation_steps == 3


def test_defaults_do_not_depend_on_the_environment(monkeypatch):
    before = RunConfig(), GradScalerKwargs()
    for name in ("ACCEL__MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION", "ACCEL_MIXED_PRECISION"):
        monkeypatch.setenv(name, "bf16")
    assert (RunConfig(), GradScalerKwargs()) == before
    assert GradScalerKwargs().to_kwargs() == {}


def test_a_preset_counts_where_no_other_source_gives_a_value(resolve):
    presets = {"device": ("cpu", "variable OTHER_CPU"), "shard.policy.min_size": (4, "other.ini")}
    assert resolve(presets=presets).origins == {
        "device": "variable OTHER_CPU",
        "shard.policy.min_size": "other.ini",
    }
    assert resolve("device: toy\n", presets=presets).origins["device"] == (
        "accel.yaml:1:1 (over 'cpu' from variable OTHER_CPU)"
    )


def test_python_may_contradict_a_preset(resolve):
    found = resolve(python={"device": "toy"}, presets={"device": ("cpu", "variable OTHER_CPU")})
    assert found.config.device == "toy"


def test_a_wrong_preset_is_refused_by_the_name_of_who_gave_it(resolve):
    with pytest.raises(ConfigError, match=r"variable OTHER_STEPS: gradient_accumulation_steps"):
        resolve(presets={"gradient_accumulation_steps": ("many", "variable OTHER_STEPS")})
