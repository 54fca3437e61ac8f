"""Graphs of CUDA, which no CPU records."""

from __future__ import annotations


def is_graph_capturing() -> bool:
    return False
