"""Each mistake of a YAML file is one line with file, line, column, path and what to write instead."""

from __future__ import annotations

import pytest
from config_toys import TEN_MISTAKES

from accel_core import ConfigError


def mistakes(resolve, yaml: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(yaml)
    return caught.value.problems


def test_ten_mistakes_are_ten_lines_in_the_order_of_the_file(resolve):
    assert mistakes(resolve, TEN_MISTAKES) == (
        "accel.yaml:1:1: device: expected string, got [False]",
        "accel.yaml:2:1: gradient_accumulation_steps: expected integer, got '4'",
        "accel.yaml:3:1: strategi: unknown key; did you mean 'strategies'?",
        "accel.yaml:6:3: launch.nodes: given again; it is already on line 5",
        "accel.yaml:7:11: project.projct_dir: unknown key; did you mean 'project_dir'?",
        "accel.yaml:9:3: grad_scaler.init_scale: expected number, got '2.0'",
        "accel.yaml:10:3: grad_scaler.enabled: expected boolean, got 'false'",
        "accel.yaml:12:3: shard.stage: expected one of 1, 2, 3, got 4",
        "accel.yaml:13:1: rng_types: expected array, got {'generator': 1}",
        "accel.yaml:14:1: 1: unknown key",
    )


def test_the_message_ends_with_what_to_do(resolve):
    with pytest.raises(ConfigError, match=r"(?s)strategi: unknown.*`accel config check`[^\n]*$"):
        resolve("strategi: x\n")


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("", "accel.yaml: holds no keys and values, as in `device: cpu`; `accel config init` writes"),
        ("# nothing\n", "accel.yaml: holds no keys and values"),
        ("- a\n", "accel.yaml: holds no keys and values"),
        ("cpu\n", "accel.yaml: holds no keys and values"),
        (
            "device: [\n",
            "accel.yaml:2:1: cannot be read: expected the node content",
        ),
        (
            "device: a\n\tb: c\n",
            "accel.yaml:2:1: cannot be read: found character '\\t' that cannot start any token",
        ),
        ("device: *x\n", "accel.yaml:1:9: cannot be read: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2\n", "accel.yaml:2:1: cannot be read: but found another document"),
        ("launch: [1]\n", "accel.yaml:1:1: launch: is a section: expected keys and values, got ['1']"),
        ("launch: 2\n", "accel.yaml:1:1: launch: is a section: expected keys and values, got 2"),
        ("shard: &x {extra: *x}\n", "accel.yaml: cannot be read: maximum recursion depth exceeded"),
        (
            "device: cpu\n<<: 3\n",
            "accel.yaml:2:1: <<: unknown key",
        ),
        (
            "launch: {nodes: 1, nodes: 2}\n",
            "accel.yaml:1:20: launch.nodes: given again; it is already on line 1",
        ),
        ("? [a, b]\n: c\n", "accel.yaml:1:3: keys are text, not a list or mapping"),
    ],
)
def test_what_is_no_mapping_is_said_with_its_place(resolve, yaml, expected):
    (line,) = mistakes(resolve, yaml)
    assert line.startswith(expected)


def test_a_python_tag_is_refused_and_runs_nothing(resolve, tmp_path):
    (line,) = mistakes(resolve, f"device: !!python/object/apply:os.mkdir [{tmp_path}/made]\n")
    assert line.startswith("accel.yaml:1:9: cannot be read: the tag ")
    assert "os.mkdir' has no meaning here; leave it out" in line
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_not_text_is_said(resolve, tmp_path):
    (tmp_path / "accel.yaml").write_bytes(b"device: \xff\xfe")
    assert mistakes(resolve, None)[0].startswith("accel.yaml: cannot be read: 'utf-8' codec")


def test_a_file_named_but_missing_is_an_error(resolve):
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot be read: No such file"):
        resolve(ACCEL_CONFIG="nope.yaml")


def test_merge_keys_give_the_values_of_the_anchor_and_own_keys_win(resolve):
    yaml = (
        "shard: &base {stage: 2, cpu_offload: true}\nstrategies:\n  a: {plugin: shard, <<: *base, stage: 3}\n"
    )
    assert resolve(yaml).config.strategies["a"] == {"plugin": "shard", "stage": 3, "cpu_offload": True}


def test_a_list_names_the_item_that_is_wrong(resolve):
    (line,) = mistakes(resolve, "log_with: [a, [b]]\n")
    assert line == "accel.yaml:1:1: log_with: expected string, got ['b'] at [1]"


def test_a_section_within_a_section_has_its_own_positions(resolve):
    (line,) = mistakes(resolve, "shard:\n  policy:\n    param_dtype: bf6\n")
    place, _, message = line.partition(": shard.policy.param_dtype: ")
    assert (place, message) == (
        "accel.yaml:3:5",
        "expected one of 'fp32', 'bf16', got 'bf6'; did you mean 'bf16'?",
    )


def test_a_section_whose_keys_are_commented_out_is_empty(resolve):
    assert resolve("device: cpu\nshard:\n").config.device == "cpu"


def test_a_check_of_the_class_itself_is_a_line_too(resolve):
    yaml = "device: cpu\nshard:\n  stage: 1\n  cpu_offload: true\n"
    assert mistakes(resolve, yaml) == ("accel.yaml:3:3: shard: stage 1 has nothing to offload",)


def test_a_tag_is_a_mistake_with_its_place(resolve):
    assert mistakes(resolve, "device: !secret x\n") == (
        "accel.yaml:1:9: cannot be read: the tag '!secret' has no meaning here; leave it out",
    )


def test_what_only_python_can_give_says_so(resolve):
    assert mistakes(resolve, "shard: {wrap: f}\n") == (
        "accel.yaml:1:9: shard.wrap: can be given in Python only",
    )


def test_mistakes_of_every_kind_come_in_one_pass_in_the_order_of_their_lines(resolve):
    yaml = (
        "device: quantum\n"
        "strategy: shrd\n"
        "launch: {nodes: 1, node_rank: 3}\n"
        "mixed_precision: 5.5.5\n"
        "log_with: [abacus]\n"
        "grad_scaler: {init_scale: big}\n"
        "strategies: {a: {plugin: shrad, stage: 4}}\n"
        "total: 1\n"
    )
    found = [line.split(": ")[:2] for line in mistakes(resolve, yaml)]
    assert found == [
        ["accel.yaml:1:1", "device"],
        ["accel.yaml:2:1", "strategy"],
        ["accel.yaml:3:10", "launch"],
        ["accel.yaml:4:1", "mixed_precision"],
        ["accel.yaml:5:1", "log_with"],
        ["accel.yaml:6:15", "grad_scaler.init_scale"],
        ["accel.yaml:7:18", "strategies.a.plugin"],
        ["accel.yaml:8:1", "total"],
    ]


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("mixed_precision: null\n", "accel.yaml:1:1: mixed_precision: expected string, got null"),
        ("device:\n", "accel.yaml:1:1: device: expected string, got null"),
        (
            "process_group: {timeout: -5}\n",
            "accel.yaml:1:17: process_group.timeout: must be at least 0.001, got -5.0",
        ),
    ],
)
def test_a_value_that_no_run_can_have_is_a_mistake_of_that_value(resolve, yaml, expected):
    assert mistakes(resolve, yaml) == (expected,)


def test_a_message_quotes_at_most_200_characters_of_a_value(resolve):
    (line,) = mistakes(resolve, f"device: [{', '.join(['value'] * 3000)}]\n")
    assert line.startswith("accel.yaml:1:1: device: expected string, got ['value', ")
    assert len(line) < 250


def test_a_file_of_nested_aliases_costs_no_more_than_its_size(resolve):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)]
    (line, *_) = mistakes(resolve, "a0: &a0 [x]\n" + "".join(levels) + "log_with: *a8\n")
    assert "cannot be read: its aliases, written out, are more values than a config can hold" in line
