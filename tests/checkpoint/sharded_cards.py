"""Cards of the strategies in sharded_job."""

from __future__ import annotations

from accel_core import Card


def strategy(name: str) -> Card:
    return Card(
        name=name,
        slot="strategy",
        summary="A toy.",
        api_version="1.0",
        offers={"freezing", "unfreezing", "replacing", "regrouping"},
        implementation=f"sharded_job:{name.title()}",
    )


WHOLE, SHARDS, TENSOR, FLAT, STAGES = map(strategy, ("whole", "shards", "tensor", "flat", "stages"))
