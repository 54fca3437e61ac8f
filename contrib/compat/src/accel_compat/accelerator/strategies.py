"""Strategy plugins among Accelerate's arguments, translated to accel-core's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import fields, frozen

from accel_compat.configs.deepspeed import DeepSpeedPlugin
from accel_compat.configs.fsdp import FullyShardedDataParallelPlugin
from accel_compat.configs.handlers import DistributedDataParallelKwargs
from accel_compat.configs.megatron import MegatronLMPlugin
from accel_compat.configs.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel_compat.environment.variables import parse_flag_from_env
from accel_compat.notices import warn_once
from accel_compat.packages import load
from accel_compat.unsupported import NotServedError
from accel_core import ParallelismConfig as Sizes

_VARIABLES: Final = {
    "strategy": "Accelerate's variables ACCELERATE_USE_…",
    "extensions": "Accelerate's variables PARALLELISM_CONFIG_…",
}
_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "fsdp_plugin": (FullyShardedDataParallelPlugin, "ACCELERATE_USE_FSDP"),
    "megatron_lm_plugin": (MegatronLMPlugin, "ACCELERATE_USE_MEGATRON_LM"),
    "parallelism_config": (ParallelismConfig, "ACCELERATE_USE_PARALLELISM_CONFIG"),
    "torch_tp_plugin": (TorchTensorParallelPlugin, ""),
}
"""Argument -> the class of its objects, and the variable that asks for one."""


@frozen
class Chosen:
    """Strategy plugins that were asked for; None where not."""

    fsdp: FullyShardedDataParallelPlugin | None
    deepspeed: Any
    """A DeepSpeedPlugin, or several by name."""
    tensors: Any
    megatron: MegatronLMPlugin | None
    mesh: ParallelismConfig | None
    by_variables: bool
    """True if variables ask for all this, and no argument does."""

    def core(self) -> dict[str, Any]:
        """Return the arguments of accel-core's Accelerator that say the same."""
        plugins = [] if self.fsdp is None else [self.fsdp.to_ours()]
        if self.mesh is not None:
            plugins = _on(self.mesh, plugins, self.deepspeed)
        several = isinstance(self.deepspeed, dict)
        others = (self.tensors, self.megatron, None if several else self.deepspeed)
        plugins += [each.to_ours() for each in others if each is not None]
        if self.by_variables:
            return {"presets": _presets(plugins)}
        if not several:
            return {"plugins": plugins}
        named = {name: {"plugin": "deepspeed", **each.translation()} for name, each in self.deepspeed.items()}
        return {"plugins": plugins, "strategies": named, "strategy": next(iter(named))}

    def usable(self, handlers: Any) -> list[Any]:
        """Return the handlers, without DDP's where another strategy was asked for."""
        sharded = self.mesh is not None and (self.mesh.dp_shard_enabled or self.mesh.tp_enabled)
        if not (self.fsdp or self.deepspeed or self.megatron or sharded):
            return list(handlers or ())
        left = [each for each in handlers or () if isinstance(each, DistributedDataParallelKwargs)]
        if any(each.translation() for each in left):
            warn_once("DistributedDataParallelKwargs have no meaning under another strategy than DDP")
        return [each for each in handlers or () if each not in left]


def chosen_strategies(given: Mapping[str, Any]) -> Chosen:
    """Read the arguments, and the variables that stand for them.

    Raises:
        ValueError: two arguments say the same.
        TypeError: one is of another class than it should be.
    """
    found: dict[str, Any] = {}
    for name, (kind, variable) in _KINDS.items():
        found[name] = given[name]
        if given[name] is None and parse_flag_from_env(variable):
            found[name] = kind()
        elif given[name] is not None and not isinstance(given[name], kind):
            raise TypeError(f"`{name}` must be a {kind.__name__} object.\npass {name}={kind.__name__}(...)")
    return Chosen(
        fsdp=found["fsdp_plugin"],
        deepspeed=_deepspeed(given),
        tensors=found["torch_tp_plugin"],
        megatron=found["megatron_lm_plugin"],
        mesh=found["parallelism_config"],
        by_variables=all(given[name] is None for name in (*_KINDS, "deepspeed_plugin", "deepspeed_plugins")),
    )


def _deepspeed(given: Mapping[str, Any]) -> Any:
    plugin = given["deepspeed_plugin"] or given["deepspeed_plugins"]
    if given["deepspeed_plugin"] and given["deepspeed_plugins"]:
        raise ValueError("You cannot pass in both `deepspeed_plugins` and `deepspeed_plugin`.")
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        plugin = DeepSpeedPlugin()
    each = list(plugin.values()) if isinstance(plugin, dict) else [plugin] if plugin else []
    for one in each:
        if not isinstance(one, DeepSpeedPlugin):
            raise TypeError("`deepspeed_plugin` must be a DeepSpeedPlugin object, or a dict of some by name.")
    for one in each[1:]:
        one._unselect()
    if each:
        each[0].select(_from_accelerator_state=True)
    return plugin


_SECTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "FullyShardedDataParallelPlugin": ("strategy", "fsdp"),
    "DeepSpeedPlugin": ("strategy", "deepspeed"),
    "MegatronLMPlugin": ("strategy", "megatron"),
    "TorchTensorParallelPlugin": ("extensions", "tensor-parallel"),
    "ContextParallelPlugin": ("extensions", "cp"),
}
"""Class of ours -> the option that chooses its plugin, and the plugin's section."""


def _presets(plugins: list[Any]) -> dict[str, tuple[Any, str]]:
    """Return the plugins' settings: path -> (value, words for the value's origin).

    A file, a flag or an argument wins over them.
    """
    found: dict[str, tuple[Any, str]] = {}
    for plugin in plugins:
        if isinstance(plugin, Sizes):
            found |= {
                f"parallelism.{name}": (size, _VARIABLES["extensions"]) for name, size in plugin.items()
            }
            continue
        option, section = _SECTIONS[type(plugin).__name__]
        before = found.get(option, ([], ""))[0]
        found[option] = (section if option == "strategy" else [*before, section], _VARIABLES[option])
        for each in fields(type(plugin)):
            value = getattr(plugin, each.name)
            if value != each.default:
                found[f"{section}.{each.alias}"] = (value, _VARIABLES[option])
    return found


def _on(mesh: ParallelismConfig, plugins: list[Any], deepspeed: Any) -> list[Any]:
    """Return the config objects that lay the run out on this mesh.

    Raises:
        NotServedError: sequence parallelism without DeepSpeed.
    """
    if mesh.sp_enabled and deepspeed is None:
        raise NotServedError(
            "sp_size: only DeepSpeed splits sequences so\ngive a deepspeed_plugin, or cp_size"
        )
    if not plugins and (mesh.dp_shard_enabled or mesh.tp_enabled):
        plugins = [load("accel_fsdp:FullyShardedDataParallelPlugin", "ParallelismConfig")()]
    sizes = {name: getattr(mesh, f"{name}_size") for name in mesh.active_mesh_dims}
    if plugins and sizes:  # unset, dp_shard would be all ranks that the others leave
        sizes |= {"dp_replicate": mesh.dp_replicate_size, "dp_shard": mesh.dp_shard_size}
    if mesh.tp_handler is not None and mesh.tp_handler.enable_async_tp:
        warn_once("enable_async_tp has no effect: accel-fsdp has no asynchronous tensor parallelism")
    if mesh.cp_enabled:
        shared = load("accel_context_parallel:ContextParallelPlugin", "cp_size")
        method = mesh.cp_handler.cp_comm_strategy if mesh.cp_handler else "allgather"
        plugins = [*plugins, shared(buffers={}, rotate_method=method)]  # maybe_context_parallel shares out
    return [*plugins, Sizes(**sizes)]


def use_run_accumulation(plugin: Any, steps: int | None) -> None:
    """Let Accelerator's number of micro-batches win over DeepSpeed's config."""
    for each in plugin.values() if isinstance(plugin, dict) else filter(None, [plugin]):
        found = each.deepspeed_config.get("gradient_accumulation_steps")
        each.deepspeed_config |= {"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
        if found not in (None, "auto", steps):
            where = f"{found} in DeepSpeed's config, {steps} in Accelerator's"
            warn_once(f"gradient_accumulation_steps is {where}; the latter is used")
