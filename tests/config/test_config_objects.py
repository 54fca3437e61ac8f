"""Config objects given in Python: an object's class tells what it configures."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from attrs import evolve, frozen
from config_toys import TOYS, Policy, RivalConfig, ShardConfig

from accel_core import (
    ConfigError,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    RunConfig,
)


def chosen(*names):
    """The plugins that a run has chosen, by name."""
    return {name: TOYS.get(name) for name in names}


def test_an_object_of_core_configures_its_section(resolve):
    found = resolve(objects=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
    assert found.config.process_group.timeout == timedelta(seconds=5)
    assert found.origins == {"process_group.timeout": "InitProcessGroupKwargs(...)"}


def test_an_object_of_a_plugin_configures_the_plugin_and_asks_for_it(resolve, toys):
    mine = ShardConfig(stage=3)
    found = resolve(objects=[mine])
    assert found.config.plugins == {"shard": mine}
    assert found.plugin_config(toys.get("shard")) is mine
    assert found.objects == ("shard",)


def test_a_subclass_configures_what_its_parent_does_and_keeps_its_class(resolve):
    @frozen(kw_only=True)
    class Compatible(ShardConfig):
        """As a compat layer would derive it."""

    found = resolve("shard: {bucket_cap_mb: 4}\n", objects=[Compatible(stage=3)]).config.plugins["shard"]
    assert isinstance(found, Compatible)
    assert (found.stage, found.bucket_cap_mb) == (3, 4)


def test_what_an_object_leaves_at_its_default_may_come_from_elsewhere(resolve):
    found = resolve(
        "grad_scaler: {init_scale: 2.0, growth_interval: 7}\n", objects=[GradScalerKwargs(init_scale=8.0)]
    )
    assert (found.config.grad_scaler.init_scale, found.config.grad_scaler.growth_interval) == (8.0, 7)
    assert "over 2.0 from accel.yaml" in found.origins["grad_scaler.init_scale"]


def test_an_object_contradicting_the_environment_is_an_error(resolve):
    with pytest.raises(ConfigError, match=r"GradScalerKwargs.*init_scale: 8.0 here, but 2.0 by variable"):
        resolve(objects=[GradScalerKwargs(init_scale=8.0)], ACCEL__GRAD_SCALER__INIT_SCALE="2")


def test_an_argument_and_an_object_that_differ_are_an_error(resolve):
    with pytest.raises(ConfigError, match=r"'b' here, but 'a' by Accelerator\(project_dir=\.\.\.\)"):
        resolve(python={"project.project_dir": "a"}, objects=[ProjectConfiguration(project_dir="b")])


def test_two_objects_for_one_section_are_an_error(resolve):
    with pytest.raises(ConfigError, match="a second object for section grad_scaler"):
        resolve(objects=[GradScalerKwargs(), GradScalerKwargs(init_scale=2.0)])


def test_an_object_of_an_unknown_class_is_an_error_listing_what_can_be_given(resolve):
    with pytest.raises(ConfigError, match=r"dict\(\.\.\.\): .*AutocastKwargs.*ShardConfig"):
        resolve(objects=[{"stage": 3}])


def test_a_wrong_type_in_an_object_is_found(resolve):
    with pytest.raises(ConfigError, match=r"grad_scaler.init_scale: expected number, got 'big'"):
        resolve(objects=[GradScalerKwargs(init_scale="big")])


def test_a_wrong_type_in_an_object_of_core_is_told_with_its_option(resolve):
    with pytest.raises(ConfigError, match="project.project_dir: expected string, got 3"):
        resolve(objects=[ProjectConfiguration(project_dir=3)])


def test_callables_reach_the_plugin(resolve):
    assert resolve(objects=[ShardConfig(wrap=callable)]).config.plugins["shard"].wrap is callable


def test_an_unknown_argument_is_an_error(resolve):
    with pytest.raises(
        ConfigError, match=r"Accelerator\(mixed_precisio=\.\.\.\).*did you mean 'mixed_precision'"
    ):
        resolve(python={"mixed_precisio": "no"})


@pytest.mark.parametrize(("given", "held"), [("one", ("one",)), (["a", "b"], ("a", "b")), (None, ())])
def test_python_may_give_one_name_where_several_are_held(resolve, given, held):
    assert resolve(python={"log_with": given}).config.log_with == held


def test_a_path_object_is_a_path(resolve):
    found = resolve(python={"project.project_dir": Path("out")}).config.project
    assert (found.project_dir, found.logging_dir) == ("out", "out")


def test_logs_go_to_the_project_unless_they_have_a_folder(resolve):
    found = resolve("project: {logging_dir: logs}\n", objects=[ProjectConfiguration(project_dir="out")])
    assert (found.config.project.project_dir, found.config.project.logging_dir) == ("out", "logs")


def test_an_option_of_a_strategy_is_said_to_be_of_the_argument_strategies(resolve):
    with pytest.raises(ConfigError, match=r"^Accelerator\(strategies=...\): strategies.a.stag: unknown key"):
        resolve(python={"strategies.a.plugin": "shard", "strategies.a.stag": 3})


@pytest.mark.parametrize(
    "build",
    [
        lambda: GradScalerKwargs(growth_interval=0),
        lambda: Policy(min_size=float("nan")),
        lambda: ShardConfig(stage=4),
    ],
)
def test_an_object_that_breaks_its_own_limits_cannot_be_made(build):
    with pytest.raises(ValueError, match=r"must be at least [01]|expected one of 1, 2, 3"):
        build()


def test_the_config_pickles(resolve):
    config = resolve(
        "strategies: {a: {plugin: shard}}\n", objects=[ShardConfig(policy=Policy(min_size=2))]
    ).config
    assert pickle.loads(pickle.dumps(config)) == config
    assert isinstance(config, RunConfig)


def test_named_strategies_may_be_given_as_objects(resolve, toys):
    teacher = ShardConfig(stage=3)
    found = resolve(python={"strategies": {"teacher": teacher, "student": {"plugin": "shard"}}})
    assert found.plugin_config(toys.get("shard"), "teacher") is teacher
    assert found.plugin_config(toys.get("shard"), "student") == ShardConfig()


def test_named_strategies_of_one_plugin_have_options_of_their_own(resolve, toys):
    found = resolve(
        "strategies:\n  a: {plugin: shard, stage: 3}\n  b: {plugin: shard}\n  c: {plugin: plain}\n"
    )
    stages = [found.plugin_config(toys.get("shard"), alias).stage for alias in "ab"]
    assert stages == [3, 2]
    assert found.plugin_config(toys.get("plain"), "c") is None
    assert found.config.strategies["a"] == {"plugin": "shard", "stage": 3}


def test_an_option_of_a_named_strategy_may_come_from_the_environment(resolve, toys):
    found = resolve("strategies: {a: {plugin: shard}}\n", ACCEL__STRATEGIES__A__STAGE="3")
    assert found.plugin_config(toys.get("shard"), "a").stage == 3


def test_a_named_strategy_without_plugin_is_an_error(resolve):
    with pytest.raises(ConfigError, match=r"accel.yaml:1:18: strategies.a: needs a key 'plugin'"):
        resolve("strategies: {a: {stage: 3}}\n")
    with pytest.raises(ConfigError, match=r"accel.yaml:1:14: strategies.a: needs a key 'plugin'"):
        resolve("strategies: {a: {}}\n")


def test_a_required_option_that_nobody_gave_is_an_error_when_the_plugin_is_chosen(resolve, toys):
    with pytest.raises(
        ConfigError, match=r"rival-one.level: required key missing; set it in section rival-one"
    ):
        resolve().plugin_config(toys.get("rival-one"))


def test_a_plugin_without_options_has_no_config(resolve, toys):
    assert resolve().plugin_config(toys.get("plain")) is None


def test_a_plugin_nobody_configured_has_its_defaults(resolve, toys):
    assert resolve().plugin_config(toys.get("shard")) == ShardConfig()


def test_proposals_become_values_whose_origin_is_their_reason(resolve):
    found = resolve("shard: {stage: 3}\n").with_proposals(chosen("shard"))
    assert found.config.accumulation.adjust_scheduler is False
    assert found.origins["accumulation.adjust_scheduler"] == "shard: stage 3 steps schedulers itself"


def test_a_proposal_of_what_somebody_set_leaves_the_origin_as_it_is(resolve):
    yaml = "shard: {stage: 3}\naccumulation: {adjust_scheduler: false}\n"
    found = resolve(yaml).with_proposals(chosen("shard"))
    assert found.origins["accumulation.adjust_scheduler"] == "accel.yaml:2:16"


def test_only_chosen_plugins_propose(resolve):
    found = resolve("shard: {stage: 3}\n").with_proposals(chosen("plain"))
    assert found.config.accumulation.adjust_scheduler is True


def test_a_named_strategy_proposes_by_its_own_options(resolve):
    found = resolve("strategies: {a: {plugin: shard, stage: 3}}\nstrategy: a\n").with_proposals(
        {"a": TOYS.get("shard")}
    )
    assert found.origins["accumulation.adjust_scheduler"] == "a: stage 3 steps schedulers itself"


def test_values_are_read_once_though_a_plugin_proposes(resolve):
    found = resolve("shard: {stage: 3}", python={"rng_types": iter(["generator"])})
    again = found.with_proposals(chosen("shard"))
    assert again is not found
    assert again.config.rng_types == ("generator",)


def test_two_different_proposals_for_an_option_are_an_error_naming_both(resolve):
    with pytest.raises(
        ConfigError, match=r"rival-one: rival-one needs them: .*wants True, but it is False by shard:"
    ):
        resolve("shard: {stage: 3}\n", objects=[RivalConfig(level=1)]).with_proposals(
            chosen("shard", "rival-one")
        )


def test_a_proposal_contradicting_what_somebody_set_is_an_error(resolve):
    yaml = "shard: {stage: 3}\naccumulation: {adjust_scheduler: true}\n"
    with pytest.raises(ConfigError, match=r"wants False, but it is True by accel.yaml:2:16"):
        resolve(yaml).with_proposals(chosen("shard"))


def test_the_tree_tells_configs_apart_but_not_machines(resolve):
    trees = {
        name: resolve(python=given).tree
        for name, given in {
            "plain": {},
            "node": {"launch.nodes": 2, "launch.node_rank": 1},
            "default": {"device": "auto"},
            "other": {"device": "cpu"},
        }.items()
    }
    assert trees["plain"] == trees["node"] == trees["default"] != trees["other"]


def test_the_tree_knows_the_sections_within_a_named_strategy(resolve):
    yaml = "strategies: {a: {plugin: shard, policy: {min_size: %d}}}\n"
    assert resolve(yaml % 3).tree != resolve(yaml % 4).tree


def test_a_default_in_an_object_says_nothing_so_the_file_counts_and_its_origin_is_shown(resolve):
    found = resolve("shard: {cpu_offload: true, stage: 3}\n", objects=[ShardConfig(cpu_offload=False)])
    assert (found.config.plugins["shard"].cpu_offload, found.config.plugins["shard"].stage) == (True, 3)
    assert found.origins["shard.cpu_offload"] == "accel.yaml:1:9"


def test_an_evolved_object_is_the_same_as_one_made_anew(resolve):
    config = evolve(GradScalerKwargs(), init_scale=1024.0)
    found = resolve(objects=[config], ACCEL__GRAD_SCALER__GROWTH_INTERVAL="500").config.grad_scaler
    assert (found.init_scale, found.growth_interval) == (1024.0, 500)


def test_a_none_that_is_the_default_says_nothing(resolve):
    found = resolve("process_group: {timeout: 5}\n", objects=[InitProcessGroupKwargs(timeout=None)])
    assert found.config.process_group.timeout == timedelta(seconds=5)
