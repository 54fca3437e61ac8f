"""Device plugin `cuda`. Core's base layer runs the device; this module adds checks, switches and sensors."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
import torch.distributed as dist

from accel_core import ConfigError, hooks, implements
from accel_cuda import machine
from accel_cuda.affinity import set_numa_affinity
from accel_cuda.config import CudaConfig
from accel_cuda.health import Health, library
from accel_cuda.specs import find_chip, specs

if TYPE_CHECKING:
    from accel_core import Run, RunConfig, World

__all__ = ["CudaDevice", "environment_report", "verify"]

logger = logging.getLogger(__name__)

SWITCHES: Final = ("tf32", "cudnn_benchmark", "deterministic", "reduced_precision_reduction")
FP8_OF_AMD: Final = ("gfx94", "gfx95", "gfx120")
"""AMD chips on which torch tests fp8.

See evaluate_platform_supports_fp8 in torch/testing/_internal/common_cuda.py.
"""
_live: WeakSet[CudaDevice] = WeakSet()


def verify() -> str | None:
    """Return the reason why torch cannot compute on the GPU of this process; None if it can."""
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no usable GPU (driver {machine.driver_version()});"
            " nvidia-smi says whether the driver works and is new enough for this torch"
        )
    if torch.version.hip:
        return _verify_amd()
    major, minor = torch.cuda.get_device_capability()
    built_for = [arch for arch in torch.cuda.get_arch_list() if arch.startswith(("sm_", "compute_"))]
    if built_for and not any(_can_run(arch, major, minor) for arch in built_for):
        return f"this torch was built for {', '.join(built_for)}, the GPU is an sm_{major}{minor}"
    return None


def _verify_amd() -> str | None:
    chip, built_for = _gfx(), torch.cuda.get_arch_list()
    if built_for and chip not in built_for:
        return f"this torch was built for {', '.join(built_for)}, the GPU is a {chip}"
    return None


def _gfx(device: torch.device | int = 0) -> str:
    """Return the name of an AMD chip without its features: gfx90a for gfx90a:sramecc+:xnack-."""
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def _can_run(architecture: str, major: int, minor: int) -> bool:
    # Code for sm_XY runs on every chip of generation X from X.Y on. The driver compiles code for compute_XY,
    # so later generations run it too; compute_90a, with its letter, is for one chip.
    built, chip = divmod(int("".join(filter(str.isdigit, architecture))), 10), (major, minor)
    portable = architecture.startswith("compute_") and architecture[-1].isdigit()
    return built <= chip and (built[0] == major or portable)


class CudaDevice:
    """Device `cuda`."""

    below: Any

    def __init__(self, config: CudaConfig | None, run: Run) -> None:
        self.config = config or CudaConfig()
        self.run = run
        self._health: dict[torch.device, Health] = {}

    @implements(hooks.select_device)
    def select_device(self, world: World) -> torch.device:
        if torch.cuda.is_initialized() and not _live:
            self._warn_of_late_variables()
        device: torch.device = self.below.select_device(world)
        self._claim_switches()
        _set_switches(self.config)
        if self.config.numa_affinity:
            set_numa_affinity(device.index or 0)
        return device

    @implements(hooks.refuse)
    def refuse(self, config: RunConfig) -> Sequence[str]:
        reasons = [*machine.conflicts(self.config)]
        # is_nccl_available() is also True of a torch with RCCL.
        if self.run.world.size > 1 and not (config.process_group.backend or dist.is_nccl_available()):
            reasons.append(
                f"torch {torch.__version__} was built without NCCL, which carries tensors between GPUs\n"
                "set process_group.backend: gloo (slow), or train in one process: accel launch -n 1"
            )
        return reasons

    @implements(hooks.capabilities)
    def capabilities(self, device: torch.device) -> frozenset[str]:
        capabilities: frozenset[str] = self.below.capabilities(device)
        if torch.version.hip:
            return capabilities if _gfx(device).startswith(FP8_OF_AMD) else capabilities - {"fp8"}
        chip = torch.cuda.get_device_capability(device)
        # Older chips only emulate bf16, slower than fp32.
        first_chips = {"bf16": (8, 0), "fp8": (8, 9)}
        return capabilities - {word for word, first in first_chips.items() if chip < first}

    @implements("monitor.device_specs")
    def device_specs(self, device: torch.device) -> Mapping[str, Any]:
        about = torch.cuda.get_device_properties(device)
        chip = find_chip(about.name, about.total_memory, about.multi_processor_count)
        if chip is None:
            return {}
        peaks = specs(chip, _uses_tf32())
        # With this switch some chips exceed their figure, which is for products that accumulate in float32.
        if torch.backends.cuda.matmul.allow_fp16_accumulation:
            peaks["flops"].pop("float16", None)
        return peaks

    @implements("monitor.device_health")
    def device_health(self, device: torch.device) -> Mapping[str, Any]:
        return self._health.setdefault(device, Health(device)).read()

    @implements(hooks.run_ended)
    def run_ended(self) -> None:
        _live.discard(self)

    def _warn_of_late_variables(self) -> None:
        late = [name for name in (machine.ALLOCATOR, machine.WORKSPACE) if name in self.run.environment]
        if late:
            logger.warning(
                "%s was set too late if CUDA libraries have read it: the GPU was used before the Accelerator"
                " was made; make the Accelerator first, or start by accel launch",
                " and ".join(late),
            )

    def _claim_switches(self) -> None:
        for other in _live:
            for name in SWITCHES:
                value, other_value = getattr(self.config, name), getattr(other.config, name)
                if None not in (value, other_value) and value != other_value:
                    raise ConfigError(
                        f"cuda.{name} is {value} in this run and {other_value} in another run of this"
                        " process, and the switch belongs to the process\n"
                        "use one value, or end the other run first (end_training)"
                    )
        _live.add(self)


def _uses_tf32() -> bool | None:
    """Return True if float32 products and convolutions use TF32, False if neither does, None otherwise."""
    try:
        products, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # a script used torch's newer names, and then reading the older names raises
        return None
    return bool(products) if products == convolutions else None


def _set_switches(config: CudaConfig) -> None:
    # torch's newer `fp32_precision` is not used: after that, reading the older names raises, and much code
    # reads them. The older names set the newer ones too, with one exception below.
    cudnn = torch.backends.cudnn
    if config.tf32 is not None:
        torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
        cudnn.allow_tf32 = config.tf32
        if not config.tf32:
            # Without this, a script's torch.backends.fp32_precision = "tf32" still holds for convolutions.
            parts: list[Any] = [getattr(cudnn, name, None) for name in ("conv", "rnn")]
            for part in parts:
                if hasattr(part, "fp32_precision"):  # torch 2.9 and later
                    part.fp32_precision = "ieee"
    if config.cudnn_benchmark is not None:
        cudnn.benchmark = config.cudnn_benchmark
    if config.reduced_precision_reduction is not None:
        products = torch.backends.cuda.matmul
        products.allow_bf16_reduced_precision_reduction = config.reduced_precision_reduction
        products.allow_fp16_reduced_precision_reduction = config.reduced_precision_reduction
    if config.deterministic is not None:
        cudnn.deterministic = config.deterministic


def environment_report() -> Mapping[str, str]:
    """Return lines for `accel env`."""
    report = {
        "CUDA driver": machine.driver_version() or "none",
        "CUDA of torch": str(torch.version.cuda),
        machine.VISIBLE: os.environ.get(machine.VISIBLE, "unset"),
    }
    if torch.version.hip:
        report["ROCm of torch"] = torch.version.hip
    else:
        report["GPU sensors"] = library()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            memory = about.total_memory / 2**30
            chip = _gfx(index) if torch.version.hip else f"sm_{about.major}{about.minor}"
            report[f"GPU {index}"] = f"{about.name}, {chip}, {memory:.1f} GiB"
    return report
