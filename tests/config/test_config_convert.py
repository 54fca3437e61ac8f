"""Typed values come from plain ones strictly, from shell text by their type, and go back unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Annotated, Any, Literal

import pytest
from config_toys import Compression, Policy, ShardConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_core.config.convert import MismatchError, convert, plain
from accel_core.config.sources import RawText
from accel_core.contract.options import options_of

REFUSED = [
    ("false", bool),
    (1, bool),
    (3.9, int),
    ("30", int),
    (True, int),
    (True, float),
    ("1.5", float),
    (3, str),
    (None, int),
    ("a", tuple[str, ...]),
    ([1], tuple[str, ...]),
    ([1.0], tuple[float, float]),
    ([1], dict[str, int]),
    ({"a": "b"}, Mapping[str, int]),
    ({"a": 1}, tuple[str, ...]),
    ("whole", Compression),
    ("1", Literal[1, 2]),
    (True, Literal[1, 2]),
    ("30", timedelta),
    (print, Callable[..., Any]),
    ([1], tuple[int, int]),
    (10**400, float),
    ("ab", Sequence[str]),
    (float("nan"), timedelta),
]


@pytest.mark.parametrize(("raw", "kind"), REFUSED)
def test_nothing_is_guessed(raw, kind):
    with pytest.raises(MismatchError):
        convert(raw, kind)


ACCEPTED = [
    (1, float, 1.0),
    (None, int | None, None),
    ("auto", int | Literal["auto"], "auto"),
    (4, int | Literal["auto"], 4),
    ([1, 2], tuple[int, ...], (1, 2)),
    ([1, 2], list[int], [1, 2]),
    ([1, 2], tuple[float, float], (1.0, 2.0)),
    ({"a": 1}, Mapping[str, float], {"a": 1.0}),
    ("half", Compression, Compression.HALF),
    (90, timedelta, timedelta(seconds=90)),
    (timedelta(1), timedelta | None, timedelta(1)),
    ({"any": [thing := object()]}, Any, {"any": [thing]}),
    ([1], Sequence[int], (1,)),
    (["a"], AbstractSet[str], frozenset({"a"})),
    (["a"], set[str], {"a"}),
    ({"a": [1, 2]}, dict[str, list[float]], {"a": [1.0, 2.0]}),
    ([], tuple, ()),
    (4, Annotated[int, "a count"], 4),
]


@pytest.mark.parametrize(("raw", "kind", "value"), ACCEPTED)
def test_a_value_of_the_type_passes(raw, kind, value):
    assert convert(raw, kind) == value
    assert type(convert(raw, kind)) is type(value)


FROM_TEXT = [
    ("1", Literal[1, 2], 1),
    ("on", tuple[str, ...], ("on",)),
    ("no", str, "no"),
    ("no", bool, False),
    ("true", bool, True),
    ("123", str, "123"),
    ("123", int, 123),
    ("1e-4", float, 1e-4),
    ("1e-4", str, "1e-4"),
    ("null", str | None, None),
    ("'no'", str, "no"),
    ("a: b # c", str, "a: b # c"),
    ("{", str, "{"),
    ("host:29500", str | None, "host:29500"),
    ("auto", int | Literal["auto"], "auto"),
    ("2", int | Literal["auto"], 2),
    ("a,b", tuple[str, ...], ("a", "b")),
    ("[a, b]", tuple[str, ...], ("a", "b")),
    ("a", tuple[str, ...], ("a",)),
    ("1,2", tuple[int, ...], (1, 2)),
    ("{a: 1}", Mapping[str, Any], {"a": 1}),
    ("90", timedelta, timedelta(seconds=90)),
    ("half", Compression, Compression.HALF),
    ("no", Compression, Compression.NO),
]


@pytest.mark.parametrize(("text", "kind", "value"), FROM_TEXT)
def test_text_is_read_by_the_type_it_is_meant_for(text, kind, value):
    assert convert(RawText(text), kind) == value


def test_text_that_is_not_of_the_type_is_refused():
    with pytest.raises(MismatchError, match="expected integer, got 'many'"):
        convert(RawText("many"), int)


def test_a_shell_has_no_quotes_to_remove():
    with pytest.raises(MismatchError, match=r"expected integer, got 4\.5$"):
        convert(RawText("4.5"), int)


def test_the_part_of_a_mapping_that_is_wrong_is_named_where_other_types_are_allowed_too():
    with pytest.raises(MismatchError, match=r"^expected integer, got 'x' at \['a'\]$"):
        convert({"a": "x"}, Mapping[str, int] | None)


def test_a_mistake_in_a_mapping_is_named_by_its_key():
    with pytest.raises(MismatchError, match=r"^expected integer, got 'x' at \['b'\]$"):
        convert({"a": 1, "b": "x"}, Mapping[str, int])


@pytest.mark.parametrize("kind", [Sequence, tuple, list, Sequence[str]])
def test_text_of_a_file_is_not_the_list_of_its_letters(kind):
    with pytest.raises(MismatchError, match="expected array, got 'ab'"):
        convert("ab", kind)


policies = st.builds(Policy, param_dtype=st.sampled_from(["fp32", "bf16"]), min_size=st.integers(0, 9))
texts = st.text(max_size=8)
configs = st.builds(
    ShardConfig,
    stage=st.sampled_from([2, 3]),
    bucket_cap_mb=st.integers(1, 10**9),
    cpu_offload=st.booleans(),
    compression=st.sampled_from(Compression),
    patience=st.none() | st.timedeltas(timedelta(0), timedelta(days=400)),
    betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    modules=st.lists(texts, max_size=3).map(tuple),
    extra=st.dictionaries(texts, st.none() | st.booleans() | st.integers() | texts | st.lists(st.integers())),
    policy=policies,
)


@settings(max_examples=40, deadline=None)
@given(configs)
def test_a_config_written_as_plain_values_reads_back_the_same(config):
    written = json.loads(json.dumps(plain(config)))
    for name, option in options_of(ShardConfig).items():
        if name not in ("wrap", "dtype", "policy"):
            assert convert(written[name], option.kind) == getattr(config, name)


@settings(max_examples=40, deadline=None)
@given(configs)
def test_to_kwargs_is_the_difference_from_the_defaults(config):
    assert ShardConfig(**config.to_kwargs()) == config
    assert all(getattr(ShardConfig(), name) != value for name, value in config.to_kwargs().items())


def test_what_no_text_can_hold_becomes_its_name():
    assert plain(ShardConfig(wrap=callable))["wrap"] == "builtins.callable"
