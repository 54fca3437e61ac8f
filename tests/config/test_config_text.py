"""A value is the same from a file, a variable, a flag or Python; what cannot be read is one line."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from config_toys import TOYS, ShardConfig
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accel_core import ConfigError
from accel_core.config.convert import plain
from accel_core.config.resolve import load

words = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), max_size=8)
VALUES = st.one_of(
    st.tuples(st.just("modules"), st.lists(words, max_size=3).map(tuple)),
    st.tuples(st.just("bucket_cap_mb"), st.integers(1, 10**9)),
    st.tuples(st.just("betas"), st.tuples(st.floats(0, 1), st.floats(-1e30, 1e30))),
    st.tuples(st.just("patience"), st.none() | st.integers(0, 10**9).map(lambda s: timedelta(seconds=s))),
    st.tuples(st.just("extra"), st.dictionaries(words, st.integers() | words | st.booleans(), max_size=2)),
)


def read(name, **sources):
    with tempfile.TemporaryDirectory() as folder:
        if "file" in sources:
            Path(folder, "accel.yaml").write_text(sources.pop("file"), encoding="utf-8")
        return getattr(
            load(discovery=TOYS, directory=folder, **{"environment": {}} | sources).config.plugins["shard"],
            name,
        )


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_a_value_as_text_is_that_value_from_every_source(option):
    name, value = option
    text = json.dumps(plain(value), ensure_ascii=False)
    sources = [
        {"file": yaml.safe_dump({"shard": {name: plain(value)}}, allow_unicode=True)},
        {"environment": {f"ACCEL__SHARD__{name.upper()}": text}},
        {"flags": [(f"shard.{name.replace('_', '-')}", text)]},
        {"objects": [ShardConfig(**{name: value})]},
    ]
    for each in sources:
        assert read(name, **each) == value, each


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab*.[]{}0-3!^", min_size=1, max_size=8), min_size=1, max_size=3))
@example(["layers.[0-3].experts"])
@example(["h[3]", "[!a]"])
@example(["[jsonl"])
def test_a_list_typed_in_a_shell_is_all_its_items_or_an_error(patterns):
    text = ",".join(patterns)
    try:
        found = read("modules", flags=[("shard.modules", text)])
    except ConfigError:
        return
    as_yaml = text[1:-1] if text[0] + text[-1] == "[]" else text
    assert "".join(found).replace(",", "") in (text.replace(",", ""), as_yaml.replace(",", ""))
    if not set("[]{}") & set(text):
        assert found == tuple(patterns)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("layers.[0-3].experts", ("layers.[0-3].experts",)),
        ("layers.[0,3].experts,head", ("layers.[0,3].experts", "head")),
        ("[0-3],h[1]", ("[0-3]", "h[1]")),
        ("[a, b]", ("a", "b")),
        ("[jsonl", ("[jsonl",)),
        ("[]", ()),
    ],
)
def test_brackets_stay_in_the_items_of_a_list(resolve, text, items):
    assert resolve(ACCEL__SHARD__MODULES=text).config.plugins["shard"].modules == items


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[0.1 0.2]", r"expected number, got '0.1 0.2' at \[0\]"),
        ("[0.1,x]", r"expected number, got 'x' at \[1\]"),
        (",", "expected array"),
    ],
)
def test_text_that_is_no_list_of_the_type_is_refused_rather_than_empty(resolve, text, said):
    with pytest.raises(ConfigError, match=f"shard.betas: {said}"):
        resolve(ACCEL__SHARD__BETAS=text)


@pytest.mark.parametrize("text", ["010", "009", "1:30", "0b11", "0x10"])
def test_a_number_with_two_meanings_is_refused_from_a_shell_and_a_file(resolve, text):
    with pytest.raises(ConfigError, match=f"launch.nodes: expected integer, got '{text}'"):
        resolve(flags={"launch.nodes": text})
    with pytest.raises(ConfigError, match=f"launch.nodes: expected integer, got '{text}'"):
        resolve(f"launch: {{nodes: {text}}}\n")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("3E20", 3e20), ("-.5e3", -500.0), ("1.0e30", 1e30)]
)
def test_an_exponent_makes_a_number_in_a_file_and_in_a_shell(resolve, text, value):
    assert resolve(f"shard: {{betas: [1, {text}]}}\n").config.plugins["shard"].betas == (1.0, value)
    assert resolve(flags={"shard.betas": f"1,{text}"}).config.plugins["shard"].betas == (1.0, value)


@pytest.mark.parametrize("word", ["no", "on", "1"])
def test_a_word_means_in_a_file_what_the_type_of_its_option_says(resolve, word):
    found = resolve(f"device: {word}\nlog_with: [{word}]\n").config
    assert (found.device, found.log_with) == (word, (word,))


def test_a_file_may_hold_a_list_as_a_shell_does(resolve):
    assert resolve("log_with: a,b\n").config.log_with == ("a", "b")


def test_text_that_looks_like_such_a_number_stays_text(resolve):
    found = resolve(flags={"project.project_dir": "1:30", "device": "010"}).config
    assert (found.project.project_dir, found.device) == ("1:30", "010")


def test_a_date_in_a_file_is_text_and_reaches_workers_as_it_was_written(resolve):
    found = resolve("shard: {extra: {day: 2021-02-30, other: 2021-02-03}}\n")
    assert found.config.plugins["shard"].extra == {"day": "2021-02-30", "other": "2021-02-03"}


@pytest.mark.parametrize(
    "text",
    [
        "shard: !!timestamp x\n",
        "data: !!bool x\n",
        "shard: !!map x\n",
        "shard: {extra: !!map [a]}\n",
        "shard: {bucket_cap_mb: !!int x}\n",
        "shard: {extra: {a: !!binary aGk=}}\n",
        "a: " + "[" * 1000,
        "shard: {extra: " + "[" * 1000 + "\n",
        "process_group: {timeout: .inf}\n",
        "process_group: {timeout: 1.0e30}\n",
        "process_group: {timeout: .nan}\n",
    ],
)
def test_whatever_a_file_holds_is_read_or_one_config_error(resolve, text):
    with pytest.raises(ConfigError, match=r"^accel\.yaml"):
        resolve(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ACCEL__SHARD", "2021-02-30"),
        ("ACCEL__STRATEGIES__X", "!!int x"),
        ("ACCEL__SHARD", "!!bool x"),
        ("ACCEL__SHARD", "[" * 1000),
        ("ACCEL__PROCESS_GROUP__TIMEOUT", ".inf"),
        ("ACCEL__PROCESS_GROUP__TIMEOUT", "1e30"),
        ("ACCEL__LAUNCH__NODES", "9" * 5000),
        ("ACCEL__", "x"),
        ("ACCEL____DEVICE", "cpu"),
        ("ACCEL____A__B", "1"),
        ("ACCEL__SHARD____STAGE", "1"),
    ],
)
def test_whatever_a_variable_holds_is_read_or_one_config_error(resolve, name, text):
    with pytest.raises(ConfigError, match=f"^variable {name}"):
        resolve(**{name: text})


def test_a_link_to_a_missing_file_is_an_error_rather_than_no_file(resolve, tmp_path):
    (tmp_path / "accel.yaml").symlink_to(tmp_path / "unmounted" / "accel.yaml")
    with pytest.raises(ConfigError, match=r"accel\.yaml: cannot be read: No such file"):
        resolve()


def test_a_link_to_itself_is_an_error(resolve, tmp_path):
    (tmp_path / "accel.yaml").symlink_to("accel.yaml")
    with pytest.raises(ConfigError, match=r"accel\.yaml: cannot be read"):
        resolve()


def test_a_terminal_that_cannot_spell_a_key_gets_it_escaped(tmp_path, run_command):
    (tmp_path / "accel.yaml").write_text("straße: 1\n", encoding="utf-8")
    done = run_command(
        [sys.executable, "-c", "from accel_core.cli import main; main()", "config", "check"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "stra\\xdfe: unknown key" in done.stdout


def test_a_tilde_is_the_home_folder_from_every_source(resolve, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (
        {"yaml": "project: {project_dir: ~/runs}"},
        {"ACCEL__PROJECT__PROJECT_DIR": "~/runs"},
        {"python": {"project.project_dir": "~/runs"}},
    ):
        assert resolve(**{"yaml": "device: cpu\n"} | source).config.project.project_dir == f"{tmp_path}/runs"
    assert resolve("device: cpu\n", ACCEL__PROJECT__PROJECT_DIR="~").config.project.project_dir == str(
        tmp_path
    )


@pytest.mark.parametrize("text", ["#1", "&a", "~", " "])
def test_text_that_a_file_would_drop_is_that_text_from_a_shell(resolve, text):
    assert resolve(flags={"project.logging_dir": text}).settings["project", "logging_dir"].value == text


@pytest.mark.parametrize("name", ["''", "~", "[]"])
def test_a_strategy_needs_the_name_of_its_plugin(resolve, name):
    with pytest.raises(ConfigError, match="plugin"):
        resolve(f"strategies: {{main: {{plugin: {name}}}}}\n")


def test_an_empty_name_of_a_file_is_refused():
    with pytest.raises(ConfigError, match="--config names no file"):
        load(discovery=TOYS, file="", environment={})
