"""PartialState and AcceleratorState: views of the current run.

All instances share their state.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from accel_compat import runs
from accel_compat.configs.enums import MULTI, DistributedType
from accel_compat.environment.variables import parse_flag_from_env
from accel_compat.state.gradient_state import SharedDict
from accel_core import Run, ops


def is_initialized() -> bool:
    """Tell whether an AcceleratorState was made."""
    return AcceleratorState._shared_state != {}


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a function on ranks that do not run it."""
    return


def distributed_type(run: Run) -> DistributedType:
    """Accelerate's word for a run's stack."""
    words = (run.stack.strategy.card.distributed_type, run.stack.device.card.distributed_type)
    for word in words:
        if word in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
            return DistributedType(word)
    return MULTI.get(run.device.type, DistributedType.MULTI_GPU) if run.world.size > 1 else DistributedType.NO


def _facts(run: Run, cpu: bool) -> dict[str, Any]:
    several = run.world.size > 1
    return {
        "_cpu": cpu,
        "backend": torch.distributed.get_backend() if several else None,
        "debug": parse_flag_from_env("ACCELERATE_DEBUG_MODE"),
        "device": run.device,
        "distributed_type": distributed_type(run),
        "fork_launched": parse_flag_from_env("FORK_LAUNCHED", 0),
        "local_process_index": run.world.local_rank,
        "num_processes": run.world.size,
        "process_index": run.world.rank,
    }


class _Ranked:
    """The process's place in the world, in both process-wide states."""

    _shared_state: ClassVar[dict[str, Any]]
    _known_attrs: ClassVar[list[str]]
    _cpu: bool
    _mixed_precision: str
    backend: str | None
    debug: bool
    device: torch.device
    distributed_type: DistributedType
    fork_launched: bool
    local_process_index: int
    num_processes: int
    process_index: int

    @property
    def initialized(self) -> bool:
        """True if there is a state."""
        return self._shared_state != {}

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        if name in self._known_attrs:
            raise AttributeError(
                f"`{kind}` object has no attribute `{name}`. This happens if `{kind}._reset_state()`"
                " was called and an `Accelerator` or `PartialState` was not reinitialized."
            )
        raise AttributeError(f"'{kind}' object has no attribute '{name}'")

    @property
    def use_distributed(self) -> bool:
        """True if there are several processes."""
        return self.distributed_type != DistributedType.NO and self.num_processes > 1

    @property
    def is_last_process(self) -> bool:
        """True on the last rank of the world."""
        return self.process_index == self.num_processes - 1

    @property
    def is_main_process(self) -> bool:
        """True on one rank of the world."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on one rank of each node."""
        return self.local_process_index == 0

    def wait_for_everyone(self) -> None:
        """Return once every rank is here. Collective."""
        if self.num_processes > 1:
            ops.wait_for_everyone(run=runs.current())

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context that gives this process its share."""
        if self.num_processes == 1:
            return nullcontext(inputs)
        return ops.split_between_processes(inputs, apply_padding=apply_padding, run=runs.current())

    @contextmanager
    def _goes_first(self, is_main: bool) -> Any:
        if not is_main:
            self.wait_for_everyone()
        yield
        if is_main:
            self.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run the block before the others."""
        return self._goes_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the first process of each node run the block before the others there."""
        return self._goes_first(self.is_local_main_process)

    def _only(self, function: Callable[..., Any], is_here: bool) -> Callable[..., Any]:
        return function if is_here or not self.use_distributed else do_nothing

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate: run on the main process only."""
        return self._only(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate: run on the first process of each node only."""
        return self._only(function, self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate: run on the last process only."""
        return self._only(function, self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate: run on the process of that rank only."""
        if function is None:
            return lambda given: self.on_process(given, process_index)
        return self._only(function, self.process_index == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate: run on the process of that local rank only."""
        if function is None:
            return lambda given: self.on_local_process(given, local_process_index)
        return self._only(function, self.local_process_index == local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first process of each node only."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201  the method's purpose

    def destroy_process_group(self, group: Any = None) -> None:
        """Nothing to do without a group; the run's own group goes when the run ends."""
        if group is not None:
            torch.distributed.destroy_process_group(group)


class PartialState(_Ranked):
    """Device, world and ranks of this process.

    Making the first one is collective, if no Accelerator was made before.
    """

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()
    _known_attrs: ClassVar[list[str]] = [*_Ranked.__annotations__]

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
            group = {name: kwargs.get(name) for name in ("backend", "timeout", "init_method")}
            self.__dict__.update(_facts(runs.find_or_make(cpu, **group), cpu))

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state.clear()

    @property
    def default_device(self) -> torch.device:
        """The kind of device that torch has here."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found

    def set_device(self) -> None:
        """Nothing to do: the run has selected it."""

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}"
            f"{'  Backend: ' + self.backend if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class AcceleratorState(_Ranked):
    """PartialState's facts, the precision, and the plugins of the current run."""

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()
    _known_attrs: ClassVar[list[str]] = [
        *PartialState._known_attrs,
        "deepspeed_plugin",
        "deepspeed_plugins",
        "use_ipex",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "dynamo_plugin",
    ]

    deepspeed_plugins: Any

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU")
        self._check_initialized(mixed_precision, cpu)
        if self.initialized:
            return
        partial = PartialState(cpu, **kwargs)
        if not _from_accelerator:
            raise ValueError(
                "Please make sure to properly initialize your accelerator via `accelerator = Accelerator()`"
                " before using any functionality from the `accelerate` library."
            )
        asked = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        self.__dict__.update(
            partial._shared_state,
            _mixed_precision=str(getattr(asked, "value", asked)).lower(),
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugin,
            parallelism_config=parallelism_config,
            torch_tp_plugin=torch_tp_plugin,
            device_mesh=None,
        )
        for name, plugin in (("fsdp_plugin", fsdp_plugin), ("megatron_lm_plugin", megatron_lm_plugin)):
            if plugin is not None:
                setattr(self, name, plugin)

    def _check_initialized(self, mixed_precision: str | None = None, cpu: bool | None = None) -> None:
        if not self.initialized:
            return
        advice = (
            "AcceleratorState has already been initialized and cannot be changed, restart your runtime"
            " completely and pass `{}` to `Accelerator()`."
        )
        if cpu and self.device.type != "cpu":
            raise ValueError(advice.format("cpu=True"))
        differs = mixed_precision is not None and mixed_precision != self._mixed_precision
        if differs and self.distributed_type != DistributedType.DEEPSPEED:
            raise ValueError(advice.format(f"mixed_precision='{mixed_precision}'"))

    @property
    def mixed_precision(self) -> str:
        """The precision that was asked for."""
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """True if FSDP version 2 shards this run's models."""
        plugin = getattr(self, "fsdp_plugin", None)
        return (
            self.distributed_type == DistributedType.FSDP and plugin is not None and plugin.fsdp_version == 2
        )

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected DeepSpeedPlugin, if there are any."""
        plugins = self.__dict__.get("deepspeed_plugins")
        if not isinstance(plugins, dict):
            return plugins
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeedPlugin of that name."""
        return self.deepspeed_plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Prepare models with the DeepSpeedPlugin of that name from now on."""
        for key, plugin in self.deepspeed_plugins.items():
            if key != name:
                plugin._unselect()
        self.deepspeed_plugins[name].select(_from_accelerator_state=True)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"
