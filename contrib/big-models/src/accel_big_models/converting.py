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
from attrs import evolve
from torch import Tensor, nn

from accel_big_models.arranging import READERS
from accel_big_models.blocks import Block, blocks_named, named_tensors
from accel_big_models.composing import in_memory, values_of
from accel_big_models.heap import trim_heap
from accel_big_models.plans import HOST, Plan
from accel_big_models.sources import InMemory, Source
from accel_big_models.swapping import like, put, takes
from accel_big_models.tenants import Tenant, tenants_of
from accel_big_models.writing import write_blocks
from accel_core import ConfigError

__all__ = ["Convert", "convert_blocks", "converted", "unchanged_on_error"]

Convert: TypeAlias = Callable[[str, nn.Module], nn.Module]
"""(name, block with its weights on its device) -> block that takes its place."""


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give the model its modules and tensors back if the context ends with an error.

    Its parameters get their dtypes, flags, and values back where they lie as before.
    """
    restore = _restorer(model)
    try:
        yield
    except BaseException:
        restore()
        raise


def _restorer(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives the model back what it has now."""
    before = [(module, type(module), dict(vars(module)), _contents(module)) for module in model.modules()]
    trains = [(each, each.requires_grad) for each in model.parameters()]
    data = [(each, each.data) for each in model.parameters() if takes(each, each.data)]

    def restore() -> None:
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
        for parameter, flag in trains:
            parameter.requires_grad_(flag)

    return restore


def converted(
    model: nn.Module, blocks: Sequence[Block], convert: Convert, dtype: torch.dtype | None
) -> list[Block]:
    """Return a model's blocks as `convert` makes them, on the meta device.

    The model stays as it is. dtype: of floating-point weights before that; None: their own.

    Raises:
        ConfigError: `convert` needs values.
    """
    restore = _restorer(model)
    try:
        tensors = {id(each): each for block in blocks for each in block.tensors.values()}
        _exchange(model.modules(), {key: _empty(each, dtype) for key, each in tensors.items()})
        return [_tried(model, block, convert) for block in blocks]
    finally:
        restore()


def _tried(model: nn.Module, block: Block, convert: Convert) -> Block:
    module = block.module
    if not block.divided:
        try:
            module = _called(convert, block)
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"plan: convert cannot make {block.name or 'the model'} without values: {error}\n"
                "plan without convert=, which counts full sizes, or write the map: plan_from_map"
            ) from error
    return evolve(block, tensors=named_tensors(module, block.name, recurse=not block.divided))


def _called(convert: Convert, block: Block) -> nn.Module:
    made: Any = convert(block.name, block.module)
    if not isinstance(made, nn.Module) or (made is not block.module and not block.name):
        raise ConfigError(
            f"convert: for {block.name or 'the whole model'} it returned a {type(made).__name__}\n"
            "return the block, or the module that takes its place; the model itself must stay the same object"
        )
    return made


def _empty(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return like(tensor, torch.empty_like(tensor.detach(), device="meta", dtype=kind))


def convert_blocks(
    model: nn.Module,
    plan: Plan,
    tenants: Sequence[Tenant],
    convert: Convert,
    progress: Callable[[int, int], None] | None,
    *,
    mapped: bool,
) -> list[Tenant]:
    """Read a model's blocks, have each converted, and return the new tensors.

    Tensors that `convert` leaves are the model's own again, with their values as source. What it makes
    of parts on "cpu" and "disk" leaves the device at once.

    Raises:
        ConfigError: `convert` replaced a weight that is tied, left one on another device, made a buffer of
            a weight that comes and goes, or returned no module.
    """
    made: dict[int, Source | None] = {}
    by_tensor = {id(tenant.tensor): tenant for tenant in tenants}
    total, done = sum(it.tensor.numel() * it.dtype.itemsize for it in tenants), 0
    for block in blocks_named(model, {part.name for part in plan.places}):
        own = list({id(it): by_tensor[id(it)] for it in block.tensors.values()}.values())
        done += sum(it.tensor.numel() * it.dtype.itemsize for it in own if it.blocks[0].name == block.name)
        stored = {tenant: tenant.source for tenant in own}
        with ThreadPoolExecutor(READERS, "accel-big-models-load") as pool:
            loaded = dict(zip(own, pool.map(_loaded, own), strict=True))
        if not block.divided:
            _convert(model, block, loaded, convert)
        del loaded  # the next block comes into memory that this one has left
        _settle(stored)
        if not block.divided:
            made |= _moved(plan, block, model.get_submodule(block.name), stored, mapped=mapped)
        trim_heap()
        if progress is not None:
            progress(done, total)
    sources = made | {id(tenant.tensor): tenant.source for tenant in tenants}
    found = tenants_of(model, plan)
    for tenant in found:
        tenant.source = sources.get(id(tenant.tensor))
    return found


def _convert(model: nn.Module, block: Block, loaded: Mapping[Tenant, Tensor], convert: Convert) -> None:
    """Have one block converted while it has its weights."""
    before = list(block.module.modules())
    _exchange(before, {id(tenant.tensor): tensor for tenant, tensor in loaded.items()})
    trains = {tenant: tensor.requires_grad for tenant, tensor in loaded.items()}
    made = _called(convert, block)
    if made is not block.module:
        for parent in list(model.modules()):  # a module may have several names
            parent._modules.update({key: made for key, it in parent._modules.items() if it is block.module})
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
            continue
        # `convert` may have given it other data, as `block.half()` does, or frozen it.
        tenant.source = InMemory(tensor.detach(), tensor.dtype)
        if tensor.requires_grad != trains[tenant]:
            tenant.tensor.requires_grad_(tensor.requires_grad)
    # A module that was replaced is kept for the case of an error: it may not keep its weights.
    _exchange([*before, *made.modules()], {id(tensor): tenant.tensor for tenant, tensor in loaded.items()})


def _settle(stored: Mapping[Tenant, Source | None]) -> None:
    """Have weights that `convert` left as they were lie in their files again."""
    for tenant, source in stored.items():
        away = tenant.place in HOST and (tenant.place == "disk" or tenant.device.type != "cpu")
        if away and not tenant.is_buffer and tenant.source is not None:
            values = values_of(tenant.source).cpu()
            same = source is not None and source.dtype == values.dtype
            if source is not None and same and torch.equal(values_of(source), values):
                tenant.source = source
            else:
                tenant.source = in_memory(values)


def _moved(
    plan: Plan, block: Block, made: nn.Module, stored: Iterable[Tenant], *, mapped: bool
) -> dict[int, Source | None]:
    """Bring a block's new weights to the host or to disk; return sources of these."""
    known = {id(tenant.tensor) for tenant in stored}
    found = {
        name: tensor
        for name, tensor in named_tensors(made, block.name).items()
        if id(tensor) not in known and plan.place_of(name) in HOST
    }
    if plan.device.type == "cpu":
        found = {name: tensor for name, tensor in found.items() if plan.place_of(name) == "disk"}
    for name, tensor in found.items():
        if not isinstance(tensor, nn.Parameter):
            raise ConfigError(
                f"convert: it made the buffer {name}, and {block.name or 'the model'} lies on"
                f" {plan.place_of(name)!r}: buffers do not come and go\n"
                "make it a parameter that requires no gradient, or place the block where it is computed"
            )
        put(tensor, tensor.detach().cpu())
    written = {id(tensor): tensor for name, tensor in found.items() if plan.place_of(name) == "disk"}
    sources = write_blocks(list(written.values()), None, mapped=mapped)
    for tensor, source in zip(written.values(), sources, strict=True):
        there = source.tensor()
        put(tensor, torch.empty(0, dtype=source.dtype) if there is None else there)
    return dict(zip(written, sources, strict=True))


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
