"""What a step of a program written for Accelerate costs beyond the plain loop, under accel-compat.

`python compat.py [ROUNDS]`: plain PyTorch, accel-core and accel-compat take turns in one process; CPU time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import step
from arena import timed

BAR = "≤ 8 µs"


def compat(size: int, clip: bool, full: bool = False) -> Callable[[], None]:
    from accelerate import Accelerator

    return step._accelerated(Accelerator(cpu=True, gradient_accumulation_steps=size), clip, full)


def main(count: int) -> None:
    import accel_compat

    accel_compat.install()
    print("| what | plain PyTorch | accel-core | accel-compat | bar |\n|---|---|---|---|---|")
    for what, size, clip, _ in step.CASES.values():
        loops = [make(size, clip) for make in (step.raw, step.ours, compat)]
        rounds = [
            [timed(loop, clock=time.process_time) / step.STEPS for loop in loops] for _ in range(count + 1)
        ][1:]
        raw = statistics.median(plain for plain, _, _ in rounds)
        over = [statistics.median(each[at] - each[0] for each in rounds) for at in (1, 2)]
        print(
            f"| {what} | {raw:.1f} µs | +{over[0]:.1f} µs | +{over[1]:.1f} µs | {'' if clip else BAR} |",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
