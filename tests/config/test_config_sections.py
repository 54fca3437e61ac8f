"""Sections of plugins: selected or not, broken, not installed, or of nobody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import config_toys
import pytest
from config_toys import configured_by

from accel_core import ConfigError, PluginError
from accel_core.config.convert import convert, plain
from accel_core.config.sections import load_class
from accel_core.config.sources import RawText
from accel_core.plugins import catalog
from accel_core.plugins.catalog import CatalogEntry, install_hint


@pytest.fixture
def workspace(monkeypatch):
    """Plugins that exist, and are not installed."""
    rows = (CatalogEntry(name="far", slot="strategy", distribution="accel-far", folder="backends/far"),)
    monkeypatch.setattr(catalog, "catalog_entries", lambda: rows)


def problems(resolve, yaml: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(yaml)
    return caught.value.problems


def test_the_section_of_a_plugin_that_is_not_selected_is_validated(resolve):
    (line,) = problems(resolve, "strategy: plain\nshard: {bucket_cap_mb: '4'}\n")
    assert line == "accel.yaml:2:9: shard.bucket_cap_mb: expected integer, got '4'"


def test_the_section_of_a_known_plugin_that_is_missing_is_kept_with_a_note(resolve, workspace):
    found = resolve("far: {reach: 3, anything: goes}\n")
    assert found.notes == (
        f"far (accel.yaml:1:1) is kept unread: strategy far is not installed; {install_hint('backends/far')}",
    )


def test_variables_of_a_known_plugin_that_is_missing_are_kept_too(resolve, workspace):
    assert "variable ACCEL__FAR__REACH" in resolve(ACCEL__FAR__REACH="3").notes[0]


def test_the_section_of_nobody_is_an_error(resolve, workspace):
    assert problems(resolve, "fra: {}\nxyz: {}\n") == (
        "accel.yaml:1:1: fra: unknown key; did you mean 'far'?",
        "accel.yaml:2:1: xyz: unknown key",
    )


def test_another_launchers_file_is_pointed_to_what_reads_it(resolve):
    with pytest.raises(ConfigError) as raised:
        resolve("compute_environment: LOCAL_MACHINE\nnum_machines: 1\n")
    first, second, *_ = raised.value.problems
    assert first == (
        "accel.yaml:1:1: compute_environment: unknown key; `accelerate config` wrote this file: turn it into"
        f" one of ours by `accel compat import FILE -o accel.yaml` ({install_hint('contrib/compat')})"
    )
    assert second == "accel.yaml:2:1: num_machines: unknown key"


def test_what_somebody_typed_never_becomes_an_install_hint(resolve, workspace):
    assert not any("pip" in line for line in problems(resolve, "xyz: {}\n"))


def test_a_key_of_another_plugin_says_whose_it_is(resolve, workspace):
    assert problems(resolve, "rival-one: {level: 1, compression: half}\n") == (
        "accel.yaml:1:23: rival-one.compression: unknown key; it is an option of shard",
    )


def test_an_option_of_a_section_written_at_the_top_says_where_it_belongs(resolve):
    assert problems(resolve, "total_limit: 3\n") == (
        "accel.yaml:1:1: total_limit: unknown key; it is an option of project",
    )


def test_a_plugin_without_options_has_no_section(resolve):
    assert problems(resolve, "plain: {a: 1}\n") == ("accel.yaml:1:1: plain: the plugin plain has no options",)


def test_the_section_of_a_broken_plugin_harms_nobody(resolve):
    assert resolve("torn: {a: 1}\n").notes == (
        "torn (accel.yaml:1:1) is kept unread: the plugin is broken: ImportError: libtorn.so",
    )


def test_options_that_cannot_be_imported_harm_only_who_chooses_the_plugin(resolve, toys):
    found = resolve("absent: {a: 1}\n")
    assert found.notes == ("absent (accel.yaml:1:1) is kept unread: No module named 'no_such_module'",)
    with pytest.raises(PluginError, match="no_such_module"):
        found.plugin_config(toys.get("absent"))


def test_annotations_that_only_type_checkers_know_are_said(resolve, toys):
    assert "name 'nowhere' is not defined" in resolve("unreadable: {dtype: 1}\n").notes[0]
    with pytest.raises(PluginError, match="name 'nowhere' is not defined"):
        resolve().plugin_config(toys.get("unreadable"))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Path, "runs/5", Path("runs/5")),
        (Path | None, "5", Path("5")),
        (set[str], "a,b", {"a", "b"}),
        (Mapping[str, tuple[float, ...]], "{a: [1, 2]}", {"a": (1.0, 2.0)}),
        (Literal["auto"] | int, "4", 4),
        (Any, "{a: 1}", {"a": 1}),
    ],
    ids=str,
)
def test_every_other_type_is_given_by_text_and_reads_back_from_plain_values(monkeypatch, kind, text, value):
    monkeypatch.setattr(config_toys, "Typed", configured_by(kind), raising=False)
    assert load_class(config_toys.record("typed", config="config_toys:Typed"))
    assert convert(RawText(text), kind) == value
    assert convert(plain(value), kind) == value


def test_options_of_a_named_strategy_that_is_not_installed_say_what_to_install(resolve, workspace):
    (line,) = problems(resolve, "strategies: {a: {plugin: shrd, stage: 2}}\n")
    assert (
        line == "accel.yaml:1:18: strategies.a.plugin: no strategy 'shrd' is installed; did you mean 'shard'?"
    )
    (note,) = resolve("strategies: {a: {plugin: far, stage: 2}}\n").notes
    assert note.endswith(
        "kept unread: strategy far is not installed; in a clone of accel-core: pip install ./backends/far"
    )


def test_a_broken_plugin_that_nobody_mentions_is_not_mentioned(resolve, toys):
    from config_toys import ShardConfig

    assert resolve(objects=[ShardConfig(stage=3)]).notes == ()


def test_what_options_contradict_together_has_the_origin_of_the_one_that_is_named(resolve):
    with pytest.raises(ConfigError, match=r"^variable ACCEL__LAUNCH__NODE_RANK: launch: node_rank is 3"):
        resolve("launch: {nodes: 2}\n", ACCEL__LAUNCH__NODE_RANK="3")
