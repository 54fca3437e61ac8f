"""Answers of a store to one rank, for ranks that would ask the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class SharedAnswers:
    """The reading hooks of a store, and its answers so far.

    answers: the last one to each question, which is not asked again by a rank that has them from another.
    None once they are kept no more: the store is asked each time.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._asked: set[tuple[Any, ...]] = set()
        self.answers: dict[tuple[Any, ...], Any] | None = {}

    def list_stored(self, url: str) -> Mapping[str, int | None]:
        """List a folder."""
        entries: Mapping[str, int | None] = self._answer(lambda: self._store.list_stored(url), url)
        return entries

    def read_stored(self, url: str, start: int, size: int) -> bytes:
        """Read a range of a file."""
        content: bytes = self._answer(lambda: self._store.read_stored(url, start, size), url, start, size)
        return content

    def _answer(self, ask: Callable[[], Any], *question: Any) -> Any:
        if self.answers is None:
            return ask()
        if question in self._asked or question not in self.answers:
            self._asked.add(question)
            self.answers[question] = ask()
        return self.answers[question]
