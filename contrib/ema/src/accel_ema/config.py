"""The options of section `ema`, and the decay that follows from them."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from accel_core import KwargsHandler, option

__all__ = ["EMAConfig"]


@frozen(kw_only=True)
class EMAConfig(KwargsHandler):
    """Options of the moving average of weights. Section `ema`."""

    decay: float = option(0.9999, minimum=0, help="Share of the old average in the new one; at most 1.")
    warmup: Literal["ratio", "power", "none"] = option(
        "ratio",
        help="Rise to decay with the number n of updates before: (1 + n) / (10 + n);"
        " 1 - (1 + n / inv_gamma) ** -power; or not at all.",
    )
    inv_gamma: float = option(1.0, minimum=0, help="Scale of n under warmup: power.")
    power: float = option(2 / 3, minimum=0, help="Exponent under warmup: power.")
    min_decay: float = option(0.0, minimum=0, help="Decay from the second update on, at least.")
    update_after: int = option(0, minimum=0, help="Applied optimizer steps before the first update.")
    update_every: int = option(1, minimum=1, help="Applied optimizer steps from one update to the next.")
    device: Literal["same", "cpu"] = option(
        "same", help="Where the average is kept: with the weights, or on the CPU, for which a step waits."
    )

    def decay_at(self, updates: int) -> float:
        """Return the decay of an update, given the number of updates before it.

        It is 0 for the first: the average begins as a copy of the weights, as in torch's AveragedModel,
        diffusers' EMAModel and timm's ModelEmaV3.
        """
        if not updates:
            return 0.0
        rising: dict[str, float] = {
            "ratio": (1 + updates) / (10 + updates),
            "power": 1 - (1 + updates / self.inv_gamma) ** -self.power,
            "none": self.decay,
        }
        return max(min(rising[self.warmup], self.decay), self.min_decay)
