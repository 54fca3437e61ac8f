"""Losses summed over items, in micro-batches of unequal sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accel_core import ConfigError, GradScalerKwargs
from accel_testing.kit.network import dataset, given, network
from accel_testing.kit.tasks import cut, make
from accel_testing.kit.tasks_training import Trace, reference, weights

__all__ = ["float16_refusal", "ragged"]

STEPS, GLOBAL_BATCH, SCALE = 6, 24, 64.0


def ragged(accumulation: int, clip_norm: float | None, arguments: Mapping[str, Any]) -> tuple[Trace, Trace]:
    """(with an Accelerator, the plain loop over the same parts on the same device)."""
    scale = GradScalerKwargs(init_scale=SCALE)
    accelerator = make(arguments, gradient_accumulation_steps=accumulation, kwargs_handlers=[scale])
    topology, device, trace = accelerator.run.topology, accelerator.device, Trace()
    model, optimizer = accelerator.prepare(*_parts())
    first, parts = topology.reader * accumulation, topology.readers * accumulation
    shares = [_share(number, parts) for number in range(first, first + accumulation)]
    batches = ((x[share], y[share]) for x, y in _batches(device) for share in shares)
    for window in accelerator.windows(batches, model, items=lambda batch: len(batch[1])):
        for x, y in window:
            loss = cross_entropy(model(x).float(), y, reduction="sum")
            accelerator.backward(loss)
            if clip_norm is not None:
                norm = accelerator.clip_grad_norm_(model.parameters(), clip_norm)
                if accelerator.sync_gradients:
                    trace.norms.append(norm.item())  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    trace.weights.extend(weights(model, accelerator))
    reference = _by_hand(parts, clip_norm, device, accelerator.mixed_precision)
    accelerator.end_training()
    return trace, reference


def _by_hand(parts: int, clip_norm: float | None, device: torch.device, precision: str) -> Trace:
    trace = Trace()
    model, optimizer = _parts(device, precision)
    scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=precision == "fp16")
    for x, y in _batches(device):
        for number in range(parts):
            cut()
            share = _share(number, parts)
            with reference.context(precision, device):
                output = model(x[share])
            loss = cross_entropy(output.float(), y[share], reduction="sum")
            scaler.scale(loss / GLOBAL_BATCH).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            trace.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trace.weights.extend(weights(model))
    return trace


def _parts(
    device: torch.device | None = None, precision: str = "no"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = network()
    if device is not None:  # the plain loop's; first: on some devices that makes other parameters
        model = reference.convert(model.to(device), precision)
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def _batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = dataset(STEPS * GLOBAL_BATCH).tensors
    for start in range(0, len(x), GLOBAL_BATCH):
        batch = slice(start, start + GLOBAL_BATCH)
        yield x[batch].to(device), y[batch].to(device)


def _share(number: int, count: int) -> slice:
    """Return the samples of one micro-batch; each is larger than the one before."""
    start, stop = (GLOBAL_BATCH * at * (at + 1) // (count * (count + 1)) for at in (number, number + 1))
    return slice(start, stop)


def float16_refusal(arguments: Mapping[str, Any]) -> tuple[str, str, int]:
    """Prepare a float16 model under fp16: the error, its first weight, units left."""
    accelerator, model = make(arguments, mixed_precision="fp16"), given.network().half()
    try:
        accelerator.prepare(model)
        said = "nothing"
    except ConfigError as error:
        said = str(error)
    units = len(accelerator.run.units)
    accelerator.end_training()
    return said, next(name for name, _ in model.named_parameters()), units
