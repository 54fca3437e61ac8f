"""A job: what a launcher starts."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

__all__ = ["Job"]


@frozen(kw_only=True)
class Job:
    """The workers that a launcher starts. Picklable."""

    argv: tuple[str, ...]
    """The command of one worker, interpreter included."""
    nodes: int = 1
    node_rank: int = 0
    processes_per_node: int = 1
    rendezvous: str | None = None
    """host:port of node 0; None on a single node (a free port of 127.0.0.1 is taken)."""
    max_restarts: int = 0
    min_nodes: int | None = None
    """Number of nodes to start with, or to go on with after losing some; None: all."""
    environment: Mapping[str, str] = field(factory=dict)
    """Variables that each worker gets on top of this process's environment."""
