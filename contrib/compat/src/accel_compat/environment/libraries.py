"""Availability of libraries and devices. No answer initializes a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import torch
from packaging.version import Version, parse

from accel_compat.environment.constants import STR_OPERATION_TO_FUNC
from accel_compat.environment.variables import parse_flag_from_env, patch_environment, str_to_bool
from accel_compat.unsupported import NotServedError
from accel_core import install_hint

_TORCH: Final = parse(metadata.version("torch"))
"""Of the distribution, as Accelerate compares it.

Wheels of PyPI call themselves +cu132 in torch only.
"""


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare a version, or that of an installed distribution, to another."""
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation {operation!r} is not one of {', '.join(STR_OPERATION_TO_FUNC)}")
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version to another."""
    return compare_versions(_TORCH, operation, version)


F = TypeVar("F", bound=Callable[..., Any])

_OF_THEIR_NAME: Final = """
    amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib pandas peft pytest
    sagemaker schedulefree swanlab timm torchdata torchvision tqdm trackio transformers wandb"""
_LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (name,) for name in _OF_THEIR_NAME.split()},
    "4bit_bnb": ("bitsandbytes >= 0.39.0",),
    "8bit_bnb": ("bitsandbytes >= 0.37.2",),
    "aim": ("aim < 4.0.0",),
    "ipex": ("intel_extension_for_pytorch",),
    "lomo": ("lomo_optim",),
    "mlflow": ("mlflow", "mlflow of mlflow-skinny"),
    "msamp": ("msamp of ms-amp",),
    "pynvml": ("pynvml", "pynvml of nvidia-ml-py"),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "torchao": ("torchao >= 0.6.1",),
    "torchdata_stateful_dataloader": ("torchdata >= 0.8.0",),
}
"""X of `is_X_available` -> packages of which one is needed.

`of` precedes the name of the distribution, where the package's is another.
"""
_DEVICES: Final = {
    "mlu": "torch_mlu",
    "musa": "torch_musa",
    "npu": "torch_npu",
    "sdaa": "torch_sdaa",
    "neuron": "torch_neuronx",
    "xpu": None,
}
"""Device type -> the package that brings it."""


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    if importlib.util.find_spec(pkg_name) is None:
        return False
    try:
        metadata.metadata(metadata_name or pkg_name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _has(package: str) -> bool:
    """Tell whether a package of the table is installed, in the version that it says."""
    name, *words = package.split()
    distribution = words[1] if words[:1] == ["of"] else name
    relation = words[-2:] if words[-2:-1] != ["of"] else []
    return _is_package_available(name, distribution) and (
        not relation or compare_versions(distribution, *relation)
    )


def _has_device(name: str, package: str | None) -> bool:
    if package is not None:
        if importlib.util.find_spec(package) is None:
            return False
        try:
            importlib.import_module(package)  # gives torch its module `name`
        except Exception:  # a vendor's library fails in its own ways on machines without the driver
            return False
    module = getattr(torch, name, None)
    with patch_environment(PYTORCH_CNDEV_BASED_MLU_CHECK="1"):  # as Accelerate asks torch_mlu
        return module is not None and bool(module.is_available())


def _library_check(packages: tuple[str, ...]) -> Callable[[], bool]:
    return lambda: any(map(_has, packages))


def _device_check(name: str, package: str | None) -> Callable[..., bool]:
    return lambda check_device=False: _has_device(name, package)


def _named(name: str, check: Callable[..., bool]) -> Callable[..., bool]:
    check.__name__ = check.__qualname__ = f"is_{name}_available"
    return check


_checks = {name: _library_check(packages) for name, packages in _LIBRARIES.items()}
_checks |= {name: _device_check(name, package) for name, package in _DEVICES.items()}
globals().update({f"is_{name}_available": _named(name, check) for name, check in _checks.items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., bool]: ...


def is_torch_distributed_available() -> bool:
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    return torch.distributed.is_xccl_available()


def is_rocm_available() -> bool:
    return torch.version.hip is not None and torch.cuda.is_available()


def is_hpu_available(init_hccl: bool = False) -> bool:
    return _has_device("hpu", "habana_frameworks")


def is_transformer_engine_available() -> bool:
    start = "intel_" if is_hpu_available() else ""
    return _has(f"{start}transformer_engine of {start.replace('_', '-')}transformer-engine")


def is_transformer_engine_mxfp8_available() -> bool:
    if not _has("transformer_engine of transformer-engine"):
        return False
    from transformer_engine.pytorch.fp8 import check_mxfp8_support

    return bool(check_mxfp8_support()[0])


def is_cuda_available() -> bool:
    """Ask NVML, so that a process that forks later may ask."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is usable on the device, and USE_TORCH_XLA allows it."""
    if check_is_tpu and check_is_gpu:
        raise AssertionError("check_is_tpu and check_is_gpu cannot both be true")
    if not parse_flag_from_env("USE_TORCH_XLA", True) or not _is_package_available("torch_xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    from torch_xla import runtime

    return str(runtime.device_type()) in (["TPU"] if check_is_tpu else ["GPU", "CUDA"])


def is_pippy_available() -> bool:
    return is_torch_version(">=", "2.4.0")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if _has_device("mlu", "torch_mlu"):
        return bool(torch.mlu.is_bf16_supported())  # type: ignore[attr-defined]
    if _has_device("xpu", None):
        return torch.xpu.is_bf16_supported()
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_fp16_available() -> bool:
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    return _checks["msamp"]() or is_transformer_engine_available() or _checks["torchao"]()


def is_bnb_available(min_version: str | None = None) -> bool:
    return _has("bitsandbytes" if min_version is None else f"bitsandbytes >= {min_version}")


def is_bitsandbytes_multi_backend_available() -> bool:
    if not is_bnb_available():
        return False
    import bitsandbytes

    return "multi_backend" in getattr(bitsandbytes, "features", set())


def is_megatron_lm_available() -> bool:
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and _has("megatron of megatron-core >= 0.8.0")


def is_triton_available() -> bool:
    return _has("triton of triton-xpu" if _has_device("xpu", None) else "triton")


def is_rich_available() -> bool:
    return _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_mps_available(min_version: str = "1.12") -> bool:
    return (
        is_torch_version(">=", min_version)
        and torch.backends.mps.is_available()
        and torch.backends.mps.is_built()
    )


def is_habana_gaudi1() -> bool:
    if not is_hpu_available():
        return False
    import habana_frameworks.torch.utils.experimental as htexp

    return bool(htexp._get_device_type() == htexp.synDeviceType.synDeviceGaudi)


def torchao_required(func: F) -> F:
    """Decorate: a call without torchao says what to install."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not _checks["torchao"]():
            raise ImportError(f"{func.__name__} needs torchao; install it: pip install torchao")
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


USE_TORCH_XLA = str_to_bool(os.environ.get("USE_TORCH_XLA", "true")) == 1


def install_xla(upgrade: bool = False) -> NoReturn:
    """Raise NotServedError: a program does not install packages.

    `accel plugins doctor xla` says which packages are missing.
    """
    raise NotServedError(
        "install_xla: accel-core installs nothing while a program runs\n"
        + install_hint("backends/xla[runtime]")
    )
