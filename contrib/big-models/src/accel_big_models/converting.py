"""Blocks in another form, such as quantised.

Each is read, converted on its device, and kept there. One block at a time has its weights as the checkpoint
has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accel_big_models.arranging import READERS
from accel_big_models.blocks import Block, blocks_named, named_tensors
from accel_big_models.plans import Plan
from accel_big_models.sources import InMemory, values_of
from accel_big_models.swapping import like, takes
from accel_big_models.tenants import Tenant, tenants_of
from accel_core import ConfigError

__all__ = ["Convert", "convert_blocks", "unchanged_on_error"]

Convert: TypeAlias = Callable[[str, nn.Module], nn.Module]
"""(name, block with its weights on its device) -> block that takes its place."""


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give the model its modules and tensors back if the context ends with an error.

    Its parameters get their dtypes and values back where they lie as before.
    """
    before = [(module, type(module), dict(vars(module)), _contents(module)) for module in model.modules()]
    data = [(each, each.data) for each in model.parameters() if takes(each, each.data)]
    try:
        yield
    except BaseException:
        for module, kind, attributes, contents in before:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for table, entries in zip(_tables(module), contents, strict=True):
                table.clear()
                table.update(entries)
        for parameter, values in data:
            if takes(parameter, values):
                parameter.data = values
        raise


def convert_blocks(
    model: nn.Module,
    plan: Plan,
    tenants: Sequence[Tenant],
    convert: Convert,
    progress: Callable[[int, int], None] | None,
) -> list[Tenant]:
    """Read a model's blocks, have each converted, and return the new tensors.

    Tensors that `convert` leaves are the model's own again, with their values as source.

    Raises:
        ConfigError: a block comes and goes; `convert` replaced a weight that is tied, left one on another
            device, or returned no module.
    """
    _refuse_streamed(tenants)
    by_tensor = {id(tenant.tensor): tenant for tenant in tenants}
    total, done = sum(it.tensor.numel() * it.dtype.itemsize for it in tenants), 0
    for block in blocks_named(model, {part.name for part in plan.places}):
        own = list({id(it): by_tensor[id(it)] for it in block.tensors.values()}.values())
        done += sum(it.tensor.numel() * it.dtype.itemsize for it in own if it.blocks[0].name == block.name)
        with ThreadPoolExecutor(READERS, "accel-big-models-load") as pool:
            loaded = dict(zip(own, pool.map(_loaded, own), strict=True))
        if not block.divided:
            _convert(model, block, loaded, convert)
        del loaded  # the next block comes into memory that this one has left
        if progress is not None:
            progress(done, total)
    sources = {id(tenant.tensor): tenant.source for tenant in tenants}
    found = tenants_of(model, plan)
    for tenant in found:
        tenant.source = sources.get(id(tenant.tensor))
    return found


def _convert(model: nn.Module, block: Block, loaded: Mapping[Tenant, Tensor], convert: Convert) -> None:
    """Have one block converted while it has its weights."""
    before = list(block.module.modules())
    _exchange(before, {id(tenant.tensor): tensor for tenant, tensor in loaded.items()})
    made: Any = convert(block.name, block.module)
    if not isinstance(made, nn.Module) or (made is not block.module and not block.name):
        raise ConfigError(
            f"convert: for {block.name or 'the whole model'} it returned a {type(made).__name__}\n"
            "return the block, or the module that takes its place; the model itself must stay the same object"
        )
    if made is not block.module:
        home, _, key = block.name.rpartition(".")
        model.get_submodule(home)._modules[key] = made
    present = named_tensors(made, block.name)
    _require_places(block, next(iter(loaded)).device, present)
    for tenant, tensor in loaded.items():
        mine = [name for name in tenant.names if name in block.tensors]
        stayed = sum(each is tensor for each in present.values())
        if len(tenant.names) > 1 and stayed != len(mine):
            raise ConfigError(
                f"convert: {mine[0]} was replaced, and {' and '.join(tenant.names)} are one tensor, which"
                " would come apart\nleave tied weights as they are"
            )
        if not tenant.tensor.requires_grad:
            for name in present.keys() & mine:
                present[name].requires_grad_(False)
        if not stayed:
            tenant.source = None  # its memory is free now
    # A module that was replaced is kept for the case of an error: it may not keep its weights.
    _exchange([*before, *made.modules()], {id(tensor): tenant.tensor for tenant, tensor in loaded.items()})


def _refuse_streamed(tenants: Sequence[Tenant]) -> None:
    away = [it for it in tenants if not it.is_buffer and (it.is_streamed or it.place == "disk")]
    if away:
        raise ConfigError(
            f"convert: {away[0].names[0]} lies on {away[0].place!r} and is computed on {away[0].device}:"
            " converted weights neither come and go nor stay in their file\n"
            "place all of the model where it is computed: plan_from_map(model, {'': 'cuda:0'}), say"
        )


def _require_places(block: Block, device: torch.device, present: Mapping[str, Tensor]) -> None:
    for name, tensor in present.items():
        if tensor.device != device:
            raise ConfigError(
                f"convert: {name} is on {tensor.device} afterwards, and {block.name or 'the model'} is"
                f" computed on {device}\nmake what takes its place on the device of the block's weights"
            )


def _loaded(tenant: Tenant) -> Tensor:
    """Return the values on the device, as what the model's tensor is.

    They are its source from now on.
    """
    with torch.inference_mode(False), torch.no_grad():
        values = tenant.tensor.detach() if tenant.source is None else values_of(tenant.source)
        values = values.to(tenant.device)
        tenant.source = InMemory(values, values.dtype)
        return like(tenant.tensor, values)


def _exchange(modules: Iterable[nn.Module], others: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of those with these ids."""
    for each in modules:
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if id(tensor) in others:
                    table[name] = others[id(tensor)]  # type: ignore[assignment]


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _contents(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(table) for table in _tables(module)]
