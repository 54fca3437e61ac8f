from __future__ import annotations

from attrs import frozen


@frozen
class Config:
    """Options without a word, by position."""

    size: int = 3
