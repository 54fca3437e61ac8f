"""Numbers of numpy are those of Python, and are no more guessed than these."""

from __future__ import annotations

from datetime import timedelta

import pytest

from accel_core.config.convert import MismatchError, convert

np = pytest.importorskip("numpy")


@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        (np.int64(4), int, 4),
        (np.int64(4), float | None, 4.0),
        (np.float64(0.5), float, 0.5),
        (np.float64(0.5), timedelta, timedelta(seconds=0.5)),
    ],
)
def test_a_number_of_the_type_passes(raw, kind, value):
    assert convert(raw, kind) == value
    assert type(convert(raw, kind)) is type(value)


@pytest.mark.parametrize(("raw", "kind"), [(np.float64(3.9), int), (np.True_, int), (np.True_, timedelta)])
def test_nothing_is_guessed(raw, kind):
    with pytest.raises(MismatchError):
        convert(raw, kind)
