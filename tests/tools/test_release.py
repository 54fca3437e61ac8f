"""A release is refused while a file still speaks of another version."""

from __future__ import annotations

from checkout import tool


def test_a_release_with_another_version_is_refused() -> None:
    found = list(tool("release").problems("99.0"))

    assert any("accel_core/_version.py: the version is" in line for line in found)
    assert any("CHANGELOG.md: there is no section 99.0" in line for line in found)
