"""Division of a model into blocks, which are the pieces that move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from attrs import frozen
from torch import Tensor, nn

from accel_core import ConfigError

__all__ = ["Block", "blocks_named", "blocks_of", "is_called", "named_tensors"]


@frozen
class Block:
    """A module with its tensors, or the tensors that a divided module has itself.

    name: of the module, "" the model. tensors: full names, those of tied weights each under its own name.
    """

    name: str
    module: nn.Module
    tensors: Mapping[str, Tensor]
    divided: bool
    """True if its children are blocks of their own."""


def blocks_of(
    model: nn.Module, whole: Collection[str | type[nn.Module]] | None = None, cuts: Collection[str] = ()
) -> list[Block]:
    """Return the model's blocks with tensors, in the order of registration.

    whole: classes, or their names, of modules that are never divided. None: the classes that the model
    itself lists in `_no_split_modules`, as models of transformers do, else the modules in its outermost
    lists. cuts: names of modules and tensors; a module that has one of them inside is divided in any case.

    Raises:
        ConfigError: the model has no module of any of these classes.
    """
    if whole is None:
        own = getattr(model, "_no_split_modules", None)
        chosen = _of_classes(model, own) if own else set()
        chosen = chosen or set(_in_lists(model))
    else:
        chosen = _of_classes(model, whole)
        if whole and not chosen:
            names = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ConfigError(
                f"whole={sorted(map(_name, whole))}: the {type(model).__name__} has no such module\n"
                f"it has {names}"
            )
    return [block for block in _divide("", model, chosen, cuts) if block.tensors]


def blocks_named(model: nn.Module, names: Collection[str]) -> list[Block]:
    """Return the blocks of a model that is divided down to modules of these names."""
    whole = {module for name, module in model.named_modules(remove_duplicate=False) if name in names}
    return [block for block in _divide("", model, whole, ()) if block.tensors]


def is_called(module: nn.Module) -> bool:
    """Return False for a list of modules and the like, which have no forward."""
    return getattr(module.forward, "__func__", None) is not vars(nn.Module)["forward"]


def named_tensors(module: nn.Module, prefix: str = "", *, recurse: bool = True) -> dict[str, Tensor]:
    """Return parameters and buffers by full name, tied ones by each of theirs."""
    dotted = f"{prefix}." if prefix else ""
    found: dict[str, Tensor] = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(recurse=recurse, remove_duplicate=False):
            found[f"{dotted}{name}"] = tensor
    return found


def _divide(
    name: str, module: nn.Module, whole: Collection[nn.Module], cuts: Collection[str]
) -> Iterator[Block]:
    dotted = f"{name}." if name else ""
    cut = any(each != name and each.startswith(dotted) for each in cuts)
    children = list(module.named_children())
    if not cut and (module in whole or not children):
        yield Block(name, module, named_tensors(module, name), divided=False)
        return
    yield Block(name, module, named_tensors(module, name, recurse=False), divided=True)
    for key, child in children:
        yield from _divide(f"{dotted}{key}", child, whole, cuts)


def _of_classes(model: nn.Module, classes: Collection[str | type[nn.Module]]) -> set[nn.Module]:
    names = set(map(_name, classes))
    return {module for module in model.modules() if names & {kind.__name__ for kind in type(module).__mro__}}


def _name(kind: str | type[nn.Module]) -> str:
    return kind if isinstance(kind, str) else kind.__name__


def _in_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost lists, and children without lists."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from child
        elif any(isinstance(each, (nn.ModuleList, nn.Sequential)) for each in child.modules()):
            yield from _in_lists(child)
        else:
            yield child
