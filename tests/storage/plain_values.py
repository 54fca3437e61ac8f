"""Plain data of every kind that a checkpoint stores, and when two such values are the same."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

from hypothesis import strategies as st

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.builds(range, st.integers(), st.integers(), st.integers(min_value=1)),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])).map(Path),
)


HASHABLE = st.recursive(
    SCALARS,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tuple", "$", "a"]), inner, max_size=3),
        st.sets(HASHABLE, max_size=3),
        st.builds(
            lambda items, size: deque(items, maxlen=size), st.lists(inner, max_size=3), st.none() | st.just(5)
        ),
        st.builds(bytearray, st.binary()),
        st.builds(
            defaultdict,
            st.sampled_from([None, list, dict, set, int, float, str]),
            st.dictionaries(KEYS, inner, max_size=3),
        ),
        st.builds(OrderedDict, st.dictionaries(KEYS, inner, max_size=3)),
        st.builds(Counter, st.dictionaries(st.integers(), st.integers(), max_size=3)),
    ),
    max_leaves=12,
)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        factories = [getattr(each, "default_factory", None) for each in (one, other)]
        if factories[0] is not factories[1]:
            return False
        return [*map(repr, one)] == [*map(repr, other)] and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
