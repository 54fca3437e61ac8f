"""What a step in float8 costs beyond the library's own loop: torchao by hand, and by us.

`python float8.py [ROUNDS]`: both take turns in one process; CPU time, on a CPU whose torch has products of
float8. The bar is for torchao's layers of the width that stands in a row.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from arena import timed
from torch import nn

BAR = "≤ 1.03 ×"
STEPS = 20
WIDTHS = (256, 512)
RECIPES = ("tensorwise", "rowwise")


def parts(width: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randn(64, width)


def by_hand(recipe: str, width: int) -> Callable[[], None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torchao's own import
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

    model, optimizer, inputs = parts(width)
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    for layer in model.modules():
        if isinstance(layer, Float8Linear):  # torchao casts under CUDA's autocast only
            layer.register_forward_pre_hook(lambda _, args: tuple(x.bfloat16() for x in args))

    def run() -> None:
        for _ in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def ours(recipe: str, width: int) -> Callable[[], None]:
    from accel_core import Accelerator
    from accel_torchao import Float8Config

    config = Float8Config(recipe=recipe, first_and_last=True)
    accelerator = Accelerator(cpu=True, mixed_precision="fp8-torchao", plugins=[config])
    model, optimizer, inputs = parts(width)
    model, optimizer = accelerator.prepare(model, optimizer)

    def run() -> None:
        for _ in range(STEPS):
            loss = model(inputs).float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return run


def main(count: int) -> None:
    print("| a step of four layers | torchao by hand | accel-torchao | bar |\n|---|---|---|---|")
    for width in WIDTHS:
        for recipe in RECIPES:
            loops = [make(recipe, width) for make in (by_hand, ours)]
            rounds = [
                [timed(loop, clock=time.process_time) / STEPS for loop in loops] for _ in range(count + 1)
            ][1:]
            hand = statistics.median(each for each, _ in rounds)
            share = statistics.median(mine / each for each, mine in rounds)
            print(f"| {recipe}, {width} wide | {hand:.0f} µs | {share:.3f} × | {BAR} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
