"""All benchmarks, as the table of README.md: `python benchmarks/run.py --peers PYTHON`, a few minutes.

PYTHON: the interpreter of an environment made from requirements.txt; without it the peers' columns stay
empty. On a machine that does something else at the same time, differences of microseconds mean nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import checkpoint
import gather
import host
import loader
import startup
import step
from arena import Row, between, table, within

BENCHMARKS: dict[str, Callable[..., list[Row]]] = {
    "step": step.measure,
    "loader": loader.measure,
    "gather": gather.measure,
    "checkpoint": checkpoint.measure,
    "startup": startup.measure,
    "host": host.measure,
}
QUICK = {"growth": 1, "host": 3, "loader": 3, "gather": 2, "startup": 1, "step": 3}
"""Rounds of what `--quick` measures, in this order."""
QUICK_SECONDS = 60.0
"""Time in which `--quick` begins another benchmark: on a quiet machine each of them takes less."""
README = Path(__file__).with_name("README.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*BENCHMARKS, "growth"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument(
        "--peers", metavar="PYTHON", help="interpreter that has accelerate and lightning-fabric"
    )
    parser.add_argument("--rounds", type=int, help="of each benchmark; default: as many as it needs")
    parser.add_argument("--quick", action="store_true", help="few rounds, small sizes: two minutes")
    parser.add_argument("--write", action="store_true", help="write the tables into README.md, too")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    wanted = [name for name in (QUICK if args.quick else names) if name in (args.names or names)]
    measures = {name: partial(_measured, name, args) for name in wanted}
    found, left_out = within(QUICK_SECONDS if args.quick else float("inf"), measures)
    written = {name: f"{found[name]}\n\n{_machine()}" for name in found if name == "growth"}
    rows = [row for name, measured in found.items() if name != "growth" for row in measured]
    if rows:
        written["rows"] = f"{table(rows)}\n\n{_machine()}"
    print("\n\n".join(written.values()))
    if left_out:
        print(f"\nleft out, for lack of time: {', '.join(left_out)}")
    if args.write:
        _write(written, whole=[*found] == names, quick=args.quick)


def _measured(name: str, args: argparse.Namespace) -> Any:
    """Measure one benchmark, and show on stderr what it found of several: a later one may fail."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    measured = _measure(name, args)
    if args.names != [name]:
        print(measured if name == "growth" else table(measured), file=sys.stderr, flush=True)
    return measured


def _measure(name: str, args: argparse.Namespace) -> Any:
    if name == "growth":
        import growth  # late: it imports torch, which the contenders of others do in their own processes

        return growth.table(growth.measure(quick=args.quick))
    # Contenders start in other folders; not `resolve`: the interpreter of an environment is a link.
    peers = str(Path(args.peers).absolute()) if args.peers else None
    count = args.rounds or (QUICK[name] if args.quick else None)
    return BENCHMARKS[name](peers, **({} if count is None else {"count": count}))


def _machine() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "accel-core")]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    where = [platform.system(), f"Python {platform.python_version()}", *versions, f"{os.cpu_count()} CPUs"]
    return f"{', '.join(where)}{load}"


def _write(written: Mapping[str, str], *, whole: bool, quick: bool) -> None:
    """Write tables between their marks. The large one, of several benchmarks, needs all of them."""
    if quick or not (whole or [*written] == ["growth"]):
        sys.exit("not written: README.md has all rows, or the table of growth alone, and none of --quick")
    page = README.read_text(encoding="utf-8")
    for name, block in written.items():
        page = between(page, name, block)
    README.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
