"""The plugins of strategies among Accelerate's arguments: which there are, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from accel_compat.refusing import NotServedError
from accel_compat.saying import say_once
from accel_compat.translating import load

from .parallelism_config import ParallelismConfig
from .utils.dataclasses import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from .utils.environment import parse_flag_from_env


@frozen
class Chosen:
    """What was asked for; None where it was not."""

    fsdp: FullyShardedDataParallelPlugin | None
    deepspeed: Any
    """A DeepSpeedPlugin, or several by name."""
    tensors: Any
    mesh: ParallelismConfig | None

    def core(self) -> dict[str, Any]:
        """The arguments of accel-core's Accelerator that say the same."""
        plugins = [] if self.fsdp is None else [self.fsdp.to_ours()]
        if self.mesh is not None:
            plugins = _on(self.mesh, plugins)
        if self.tensors is not None:
            plugins.append(self.tensors.to_ours())
        if not isinstance(self.deepspeed, dict):
            return {"plugins": [*plugins, *([self.deepspeed.to_ours()] if self.deepspeed else [])]}
        named = {name: {"plugin": "deepspeed", **each.translation()} for name, each in self.deepspeed.items()}
        return {"plugins": plugins, "strategies": named, "strategy": next(iter(named))}

    def usable(self, handlers: Any) -> list[Any]:
        """The handlers, without DDP's where another strategy was asked for."""
        sharded = self.mesh is not None and self.mesh.dp_shard_enabled
        if not (self.fsdp or self.deepspeed or sharded):
            return list(handlers or ())
        left = [each for each in handlers or () if isinstance(each, DistributedDataParallelKwargs)]
        if any(each.translation() for each in left):
            say_once("DistributedDataParallelKwargs have no meaning under another strategy than DDP")
        return [each for each in handlers or () if each not in left]


def chosen_strategies(given: Mapping[str, Any]) -> Chosen:
    """Read the arguments, and the variables that stand for them.

    Raises:
        ValueError: two arguments say the same.
        TypeError: one is of another class than it should be.
        NotServedError: there is no package for it yet.
    """
    if given["megatron_lm_plugin"] is not None or parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM"):
        raise NotServedError("megatron_lm_plugin needs a package for Megatron, which there is not yet")
    mesh = given["parallelism_config"]
    if mesh is None and parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        mesh = ParallelismConfig()
    return Chosen(_fsdp(given["fsdp_plugin"]), _deepspeed(given), given["torch_tp_plugin"], mesh)


def _fsdp(plugin: Any) -> FullyShardedDataParallelPlugin | None:
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return FullyShardedDataParallelPlugin()
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise TypeError("`fsdp_plugin` must be a FullyShardedDataParallelPlugin object.")
    return plugin


def _deepspeed(given: Mapping[str, Any]) -> Any:
    plugin = given["deepspeed_plugin"] or given["deepspeed_plugins"]
    if given["deepspeed_plugin"] and given["deepspeed_plugins"]:
        raise ValueError("You cannot pass in both `deepspeed_plugins` and `deepspeed_plugin`.")
    if plugin is None and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        plugin = DeepSpeedPlugin()
    each = list(plugin.values()) if isinstance(plugin, dict) else [plugin] if plugin else []
    for one in each[1:]:
        one._unselect()
    if each:
        each[0].select(_from_accelerator_state=True)
    return plugin


def _on(mesh: ParallelismConfig, plugins: list[Any]) -> list[Any]:
    """The config objects that lay the run out on this mesh."""
    if mesh.sp_enabled:
        raise NotServedError("sp_size: DeepSpeed's Ulysses is not served\ntake cp_size instead")
    sharded = mesh.dp_shard_size == -1 or mesh.dp_shard_enabled
    if sharded or plugins or mesh.tp_enabled:
        cls = load("accel_fsdp:FullyShardedDataParallelPlugin", "ParallelismConfig")
        base = plugins[0] if plugins else cls()
        sizes = {"dp_replicate_size": mesh.dp_replicate_size, "dp_shard_size": mesh.dp_shard_size}
        plugins = [evolve(base, **sizes), *plugins[1:]]
    if mesh.tp_enabled:
        split = load("accel_fsdp:TorchTensorParallelPlugin", "tp_size")
        plugins.append(split(tp_size=mesh.tp_size))
    if mesh.cp_enabled:
        shared = load("accel_context_parallel:ContextParallelPlugin", "cp_size")
        plugins.append(shared(size=mesh.cp_size))
    return plugins


def let_the_run_count(plugin: Any, steps: int | None) -> None:
    """What Accelerator was given for the micro-batches of a step wins over DeepSpeed's config."""
    for each in plugin.values() if isinstance(plugin, dict) else filter(None, [plugin]):
        found = each.deepspeed_config.get("gradient_accumulation_steps")
        each.deepspeed_config |= {"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}
        if found not in (None, "auto", steps):
            where = f"{found} in DeepSpeed's config, {steps} in Accelerator's"
            say_once(f"gradient_accumulation_steps is {where}; the latter counts")
