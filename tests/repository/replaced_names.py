"""What the packages replace of live objects of torch and of vendors, and the reason of each exception."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache

from checkout import packages, place, tree
from private_names import is_private

EXCEPTIONS: dict[str, dict[str, str]] = {
    "accel_core": {
        "_parameters": "a copy of a user's module, empty, for its get_extra_state",
        "_modules": "the same copy; and a view of a list's children, which torch compiles block by block",
        "_metadata": "of a dictionary that is made here, as load_state_dict of torch reads it",
        "_compiled_call_impl": "of the user's module, as nn.Module.compile sets it",
        "_iterator": "of a copy of torch's loader: its workers start anew",
        "__class__": "the dataset of torch's worker information, of which each worker has a copy",
    },
    "accel_bitsandbytes": {
        "__class__": "layers of the user's model become bitsandbytes' layers, in place",
    },
    "accel_context_parallel": {
        "scaled_dot_product_attention": "models call this name; torch's context_parallel does the same",
    },
    "accel_deepspeed": {
        "cdb": "DeepSpeed keeps the backend of a process group that has ended, and offers no way to drop it",
        "_hf_deepspeed_config_weak_ref": "put back: DeepSpeed's engine overwrites transformers' for good",
        "_support_torch_style_backward": "DeepSpeed sets it by stage; stage 0 needs it too",
        "_offload_accumulated_param_ids": "DeepSpeed forgets it where a window is dropped under CPU offload",
        "_hp_optimizer_states_linked": "DeepSpeed links states once, and a load gives it others",
    },
    "accel_fsdp": {
        "__class__": "modules of the user get a class before their own, as fully_shard gives them",
        "_absent": "a mark of ours, on modules of the user",
        "_is_used": "a mark of ours, on a gradient that stays for another step",
        "_post_load_hook_handle": "fully_shard's hook looks for a shard in whole weights; put back after",
        "_rng_tracker": "torch makes it in a collective of all ranks, to which other stages never come",
    },
    "accel_torchao": {
        "__class__": "Linears of the user become torchao's Float8Linear, in place, and Linears again",
        "_precomputed_scale": "torchao keeps the scale of weights that were loaded over",
    },
    "accel_transformer_engine": {
        "__class__": "layers of the user become Transformer Engine's, in place, and their own again",
    },
    "accel_xpu": {
        "allow_tf32": "torch's switch, which it documents",
        "_wrapped_by_lr_sched": "schedulers of torch ask it of the step that ipex has replaced",
    },
    "accel_big_models": {
        "__class__": "tensors of a block are exchanged in place, so that references to them stay right",
        "_compiled_call_impl": "of the user's module, as nn.Module.compile sets it",
    },
    "accel_compat": {
        "_newest_number": "of our own Accelerator",
        "__class__": "prepared objects are instances of Accelerate's classes, as programs ask by isinstance",
        "_step_count": "torch warns of a scheduler whose optimizer has skipped its step",
        "_is_accelerate_prepared": "Accelerate's own mark, which transformers reads",
        "_optimizers": "of a wrapper of ours",
        "_hf_hook": "Accelerate's own mark on modules of the user, which diffusers and peft read",
        "_old_forward": "the same",
        "_dispatched": "a mark of ours, on the user's model",
        "_purges_accelerate": "a mark of ours, on a function of ours",
        "register_parameter": "init_empty_weights replaces it for its context, as Accelerate's does",
        "_is_distributed_loading_by_transformers": "adopt() is asked to change transformers' mark of a model",
        "_is_hf_initialized": "transformers' own mark of weights that need no first values",
        "_modules": "of a copy of the user's module",
        "_orig_mod": "of torch.compile's wrapper: what it wraps was unwrapped inside",
    },
    "accel_testing": {
        "__class__": "plugins of a test get a method that only passes a hook on",
    },
    "accel_trackers": {
        "_package_version_checked": "ClearML asks its server for news at each start, and has no option",
    },
}
"""Package -> name that it replaces -> why there is no public way."""


def replaced_in(module: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[tuple[str, int]]:
    """(name, line) of each private attribute, class or function of another library that the module replaces.

    own: private attributes that our classes have.
    """
    foreign = set(_foreign_names(module))
    for node in ast.walk(module):
        for target in _targets(node):
            name = _replaced(target, foreign, own)
            if name is not None:
                yield name, target.lineno


def _targets(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return [leaf for each in targets for leaf in _leaves(each)]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr()):
            return [target]
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[of, ast.Constant(value=str(name)), *_]):
            return [ast.copy_location(ast.Attribute(of, name, ast.Store()), node)]
        case ast.Call(func=ast.Attribute(value=inner, attr="update")) if _is_dictionary_of_object(inner):
            return [
                ast.copy_location(ast.Subscript(inner, ast.Constant(each.arg), ast.Store()), node)
                for each in node.keywords
                if each.arg
            ]
    return []


def _leaves(target: ast.expr) -> list[ast.expr]:
    """Return the targets of an assignment to several names."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [leaf for each in target.elts for leaf in _leaves(each)]
    return [target]


def _replaced(target: ast.expr, foreign: set[str], own: frozenset[str]) -> str | None:
    """Return the name that an assignment to this target replaces; None if it is ours to assign."""
    match target:
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            return "__class__" if name == "__class__" else None
        case ast.Attribute(attr="__class__" | "__code__" as name):
            return name
        case ast.Attribute(value=of, attr=name) if _root(of) in foreign:
            return name
        case ast.Attribute(attr=name):
            return name if is_private(name) and name not in own else None
        case ast.Subscript(value=of, slice=ast.Constant(value=str(name))) if _is_dictionary_of_object(of):
            return name if is_private(name) and name not in own else None
    return None


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_dictionary_of_object(node: ast.expr) -> bool:
    """vars(x) and x.__dict__, but not those of `self`."""
    match node:
        case ast.Call(func=ast.Name(id="vars"), args=[ast.Name(id="self")]):
            return False
        case ast.Attribute(value=ast.Name(id="self"), attr="__dict__"):
            return False
        case ast.Call(func=ast.Name(id="vars"), args=[_]) | ast.Attribute(attr="__dict__"):
            return True
    return False


def _foreign_names(module: ast.AST) -> Iterator[str]:
    """Names that the module imports from other libraries, Python's own aside."""
    for node in ast.walk(module):
        match node:
            case ast.Import(names=names):
                yield from (
                    each.asname or each.name.partition(".")[0] for each in names if _is_foreign(each.name)
                )
            case ast.ImportFrom(module=str(path), names=names, level=0) if _is_foreign(path):
                yield from (each.asname or each.name for each in names)


def _is_foreign(path: str) -> bool:
    return path.partition(".")[0] not in sys.stdlib_module_names and not path.startswith("accel_")


@cache
def own_attributes() -> frozenset[str]:
    """Private attributes that the classes of our packages have: set on `self`, or named in the class."""
    found: set[str] = set()
    for files in packages().values():
        for file in files:
            for node in ast.walk(tree(file)):
                match node:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.add(name)
                    case ast.ClassDef(body=body):
                        found.update(_named_in(body))
    return frozenset(name for name in found if is_private(name))


def _named_in(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (each.id for each in targets if isinstance(each, ast.Name))


@cache
def replaced(package: str) -> dict[str, str]:
    """Name that a package replaces of another library's objects -> the first place."""
    found: dict[str, str] = {}
    for file in packages()[package]:
        for name, line in replaced_in(tree(file), own_attributes()):
            found.setdefault(name, place(file, line))
    return found
