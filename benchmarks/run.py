"""All benchmarks, as the table of README.md: `python benchmarks/run.py --peers PYTHON`, a few minutes.

PYTHON: the interpreter of an environment made from requirements.txt; without it the peers' columns stay
empty. On a machine that does something else at the same time, differences of microseconds mean nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import checkpoint
import gather
import host
import loader
import startup
import step
from arena import Row, table

BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "step": step.measure,
    "loader": loader.measure,
    "gather": gather.measure,
    "checkpoint": checkpoint.measure,
    "startup": startup.measure,
    "host": host.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument(
        "--peers", metavar="PYTHON", help="interpreter that has accelerate and lightning-fabric"
    )
    parser.add_argument("--rounds", type=int, help="of each benchmark; default: as many as it needs")
    args = parser.parse_args()
    # Contenders start in other folders; not `resolve`: the interpreter of an environment is a link.
    peers = str(Path(args.peers).absolute()) if args.peers else None
    rows = []
    for name in args.names or BENCHMARKS:
        options = {} if args.rounds is None else {"count": args.rounds}
        rows += BENCHMARKS[name](peers, **options)
    print(table(rows))
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "accel-core")]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    where = [platform.system(), f"Python {platform.python_version()}", *versions, f"{os.cpu_count()} CPUs"]
    print(f"\n{', '.join(where)}{load}")


if __name__ == "__main__":
    main()
