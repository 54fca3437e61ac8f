"""`accel estimate`: sizes of a model, without loading it."""

from __future__ import annotations

import json
from typing import Any

import click

from accel_core import ConfigError

__all__ = ["estimate"]


@click.command()
@click.argument("model")
@click.option(
    "--memory",
    "memories",
    multiple=True,
    metavar="PLACE=SIZE",
    help="Memory for the plan, such as cuda:0=24GB or cpu=64GiB; several times. Default: what is free.",
)
@click.option("--dtype", help="Of the weights in the plan, such as bfloat16. Default: as the model has them.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with a model of transformers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def estimate(
    model: str, memories: tuple[str, ...], dtype: str | None, trust_remote_code: bool, as_json: bool
) -> None:
    """Say how large MODEL is, what it needs to run and to train, and what fits where.

    MODEL is a folder or hub name of transformers, MODULE:FUNCTION that returns a model, or a checkpoint.
    """
    from accel_big_models.estimating import estimate as measure
    from accel_big_models.models import empty_model

    memory: dict[Any, int | str] = dict(map(_place, memories))
    found = measure(empty_model(model, trust_remote_code=trust_remote_code), memory or None, dtype=dtype)
    click.echo(json.dumps(found.as_json(model), indent=2) if as_json else found.as_table(model))


def _place(text: str) -> tuple[str, str]:
    place, equals, size = text.partition("=")
    if not equals:
        raise ConfigError(f"--memory {text}: it has no size\nwrite --memory {text}=24GB")
    from accel_big_models.planning import place_name
    from accel_big_models.sizes import bytes_in

    bytes_in(size)
    return place_name(place), size
