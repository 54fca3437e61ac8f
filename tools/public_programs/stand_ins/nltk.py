"""A stand-in for nltk, whose sentences need a download."""

from __future__ import annotations

from types import SimpleNamespace

data = SimpleNamespace(find=lambda *_: None)


def sent_tokenize(text: str) -> list[str]:
    return text.split(". ")
