"""Training on several ranks by a loop on torch's public API and by us: CPU time and memory of a step.

`python parallel.py [--pairs N] [CASE ...]` prints the table. Both loops are those of the tests that count
collectives, and train a window of three micro-batches with clipping, in blocks that take turns in the same
processes. Processes differ by luck, so each case starts several times: a start gives one ratio of CPU time,
of all ranks together, and the interval is that of Student's t around the mean of these ratios.
Memory is the most that a rank's tensors take at once in a window, counted by torch's profiler from before the
model is built, of the rank that takes most. `python parallel.py --rank CASE` is one rank of a case.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from arena import HERE, Contender, serve

LOOPS = ("by hand", "accel-core")
BARS = (1.03, 1.01)
"""Of the interval's upper end, and of memory."""
STEPS, ROUNDS, PAIRS = 2, 8, 5
"""Steps of a block, blocks of each loop after one that is not counted, starts of a case."""
WINDOWS = 4
"""Windows whose memory is counted. The least peak: it depends on how early other threads end collectives."""
PATIENCE = timedelta(minutes=5)
STUDENT = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""95 % of Student's t by degrees of freedom; more than nine count as nine."""
GRIDS = {
    "FSDP2": {"dp_shard": 2},
    "TP": {"tp": 2},
    "PP": {"pp": 2},
    "CP × FSDP2": {"cp": 2},
    "TP × FSDP2": {"dp_shard": 2, "tp": 2},
    "PP × FSDP2": {"pp": 2, "dp_shard": 2},
}
COMPILED = ", compiled"
CASES = (*GRIDS, *(f"{name}{COMPILED}" for name in GRIDS))


class Found(NamedTuple):
    """What the starts of a case gave: milliseconds by hand, ratios of time, bytes and ratio of memory."""

    milliseconds: float
    ratios: Sequence[float]
    memory: float
    memory_ratio: float


def build(case: str, loop: str) -> Callable[[], Any]:
    """Return what trains one window."""
    grid, compiled = GRIDS[case.removesuffix(COMPILED)], case.endswith(COMPILED)
    if "cp" in grid:
        sys.path.insert(0, str(HERE.parent / "backends" / "context-parallel" / "tests"))
        import cp_traffic as loops

        loops.PATIENCE = PATIENCE
        os.environ["ACCEL__FSDP__TRANSFORMER_CLS_NAMES_TO_WRAP"] = "Block"
        scale = loops.Scale(length=512, width=128, heads=4, compiled=compiled)
        return loops.by_hand("fsdp", scale) if loop == "by hand" else loops.by_accelerator("fsdp", scale)[0]
    sys.path.insert(0, str(HERE.parent / "backends" / "fsdp" / "tests"))
    import traffic_problem

    traffic_problem.PATIENCE = PATIENCE
    scale = traffic_problem.Scale(512, length=128, width=128, heads=4, rows=4, compiled=compiled)
    if loop == "by hand":
        train = traffic_problem.by_hand(grid, scale)
    else:
        train = traffic_problem.by_accelerator(grid, scale)[0]
    return lambda: train(0)


def memory_changes(profile: Any) -> list[int]:
    """Bytes that tensors took, or gave back, in their order."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found = [(each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]"]
    return [size for _, size in sorted(found)]


def rank_of(case: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    trains: dict[str, Callable[[], Any]] = {}

    def memory(loop: str) -> float:
        if not trains:
            build(case, "by hand")()  # what torch keeps from its first window on counts for no loop
        gc.collect()
        peaks, held = [], 0
        for number in range(WINDOWS):
            with torch.profiler.profile(profile_memory=True) as seen:
                if not number:
                    trains[loop] = build(case, loop)
                trains[loop]()
            changes = memory_changes(seen)
            peaks.append(held + max(itertools.accumulate(changes)))
            held += sum(changes)
        return min(peaks[1:])  # the optimizer's state is made in the first

    def work(loop: str) -> float:
        gc.collect()
        started = time.process_time()
        for _ in range(STEPS):
            trains[loop]()
        return (time.process_time() - started) / STEPS * 1e3

    cases = {f"{what.__name__} {loop}": (what, loop) for what in (memory, work) for loop in LOOPS}
    serve({name: lambda what=what, loop=loop: what(loop) for name, (what, loop) in cases.items()})


def start(case: str, number: int) -> tuple[dict[str, float], dict[str, float], float]:
    """Return milliseconds and bytes of each loop, and the ratio of time, of one start of a case."""
    ranks = math.prod(GRIDS[case.removesuffix(COMPILED)].values())
    order = LOOPS if number % 2 else LOOPS[::-1]
    contender = Contender(case, sys.executable, "parallel.py", ranks, "--rank")
    try:
        contender.answers()
        memory = {loop: max(contender.turns(f"memory {loop}")) for loop in order}
        blocks = [{loop: sum(contender.turns(f"work {loop}")) for loop in order} for _ in range(ROUNDS + 1)]
    finally:
        contender.end()
    ratio = statistics.median(each["accel-core"] / each["by hand"] for each in blocks[1:])
    return {loop: statistics.median(each[loop] for each in blocks[1:]) for loop in LOOPS}, memory, ratio


def measure(case: str, pairs: int = PAIRS) -> Found:
    starts = [start(case, number) for number in range(pairs)]
    return Found(
        statistics.median(times["by hand"] for times, _, _ in starts),
        [ratio for _, _, ratio in starts],
        statistics.median(memory["by hand"] for _, memory, _ in starts),
        statistics.median(memory["accel-core"] / memory["by hand"] for _, memory, _ in starts),
    )


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean of ratios."""
    mean, degrees = statistics.fmean(ratios), min(len(ratios), len(STUDENT)) - 1
    if not degrees:
        return -math.inf, math.inf
    half = STUDENT[degrees] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return mean - half, mean + half


def table(found: dict[str, Found]) -> str:
    head = f"CPU time, accel-core over it | 95 % | bar | memory by hand | over it | bar {BARS[1]}"
    lines = [f"| a window of three | by hand | {head} |", "|" + "---|" * 8]
    for case, each in found.items():
        low, high = interval(each.ratios)
        kept = [
            "met" if value <= bar else "**missed**"
            for value, bar in zip((high, each.memory_ratio), BARS, strict=True)
        ]
        cells = (
            f"{each.milliseconds:.0f} ms",
            f"{statistics.fmean(each.ratios):.3f}",
            f"{low:.3f} to {high:.3f}",
            kept[0],
            f"{each.memory / 1e6:.1f} MB",
            f"{each.memory_ratio:.3f}",
            kept[1],
        )
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {'; '.join(CASES)}; default: all")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--rank", choices=CASES)
    args = parser.parse_args()
    if args.rank:
        rank_of(args.rank)
        return
    found = {}
    for case in args.cases or CASES:
        found[case] = measure(case, args.pairs)
        print(case, [round(ratio, 3) for ratio in found[case].ratios], file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
