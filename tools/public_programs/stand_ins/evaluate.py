"""A stand-in for `evaluate`, whose metrics are scripts on a hub.

`compute` returns what programs read, and writes down a digest of all predictions and references. So a sample
that is missing, doubled or in another place is seen, which an accuracy may hide.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np


def load(*_: Any, **__: Any) -> Metric:
    return Metric()


class Metric:
    """Predictions and references in the order in which they came."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []

    def add_batch(self, *, predictions: Any, references: Any, **_: Any) -> None:
        self.pairs += list(zip(plain(predictions), plain(references), strict=False))

    def add(self, *, prediction: Any, reference: Any) -> None:
        self.pairs.append((prediction, reference))

    def compute(self, *, predictions: Any = (), references: Any = (), **_: Any) -> dict[str, Any]:
        self.add_batch(predictions=predictions, references=references)
        pairs, self.pairs = self.pairs, []
        digest = hashlib.sha256(repr(pairs).encode()).hexdigest()[:16]
        with Path(os.environ["PROGRAM_RECORD"]).open("a") as lines:
            lines.write(f"metric of {len(pairs)} {digest}\n")
        equal = float(np.mean([repr(p) == repr(r) for p, r in pairs])) if pairs else 0.0
        names = "accuracy f1 exact_match score mean_iou mean_accuracy overall_accuracy rouge1 wer"
        tokens = {f"overall_{name}": equal for name in ("precision", "recall", "f1")}
        return dict.fromkeys(names.split(), equal) | tokens


def plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
