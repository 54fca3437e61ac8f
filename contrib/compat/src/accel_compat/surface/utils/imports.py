"""Which libraries and devices there are. All of these answer without initializing a device."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

import torch

from accel_compat.refusing import unserved

from .environment import parse_flag_from_env, patch_environment, str_to_bool
from .versions import compare_versions, is_torch_version

F = TypeVar("F", bound=Callable[..., Any])


def _is_package_available(pkg_name: str, metadata_name: str | None = None) -> bool:
    if importlib.util.find_spec(pkg_name) is None:
        return False
    try:
        metadata.metadata(metadata_name or pkg_name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _since(package: str, operation: str, version: str) -> bool:
    return _is_package_available(package) and compare_versions(package, operation, version)


def _device(name: str) -> bool:
    module = getattr(torch, name, None)
    return module is not None and bool(module.is_available())


def is_torch_distributed_available() -> bool:
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    return torch.distributed.is_xccl_available()


def is_import_timer_available() -> bool:
    return _is_package_available("import_timer")


def is_pynvml_available() -> bool:
    return _is_package_available("pynvml") or _is_package_available("pynvml", "nvidia-ml-py")


def is_amdsmi_available() -> bool:
    return _is_package_available("amdsmi")


def is_rocm_available() -> bool:
    return torch.version.hip is not None and torch.cuda.is_available()


def is_pytest_available() -> bool:
    return _is_package_available("pytest")


def is_msamp_available() -> bool:
    return _is_package_available("msamp", "ms-amp")


def is_schedulefree_available() -> bool:
    return _is_package_available("schedulefree")


def is_transformer_engine_available() -> bool:
    if is_hpu_available():
        return _is_package_available("intel_transformer_engine", "intel-transformer-engine")
    return _is_package_available("transformer_engine", "transformer-engine")


def is_transformer_engine_mxfp8_available() -> bool:
    if not _is_package_available("transformer_engine", "transformer-engine"):
        return False
    from transformer_engine.pytorch.fp8 import check_mxfp8_support

    return bool(check_mxfp8_support()[0])


def is_lomo_available() -> bool:
    return _is_package_available("lomo_optim")


def is_cuda_available() -> bool:
    """By NVML, so that a process that forks later may ask."""
    with patch_environment(PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        return torch.cuda.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla can be used, and runs on the kind of device asked for; USE_TORCH_XLA=0 says no."""
    if check_is_tpu and check_is_gpu:
        raise AssertionError("check_is_tpu and check_is_gpu cannot both be true")
    if not parse_flag_from_env("USE_TORCH_XLA", True) or not _is_package_available("torch_xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    from torch_xla import runtime

    return str(runtime.device_type()) in (["TPU"] if check_is_tpu else ["GPU", "CUDA"])


def is_torchao_available() -> bool:
    return _since("torchao", ">=", "0.6.1")


def is_deepspeed_available() -> bool:
    return _is_package_available("deepspeed")


def is_pippy_available() -> bool:
    return is_torch_version(">=", "2.4.0")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    if is_xpu_available():
        return torch.xpu.is_bf16_supported()
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_fp16_available() -> bool:
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_4bit_bnb_available() -> bool:
    return _since("bitsandbytes", ">=", "0.39.0")


def is_8bit_bnb_available() -> bool:
    return _since("bitsandbytes", ">=", "0.37.2")


def is_bnb_available(min_version: str | None = None) -> bool:
    return (
        _is_package_available("bitsandbytes")
        if min_version is None
        else _since("bitsandbytes", ">=", min_version)
    )


def is_bitsandbytes_multi_backend_available() -> bool:
    if not is_bnb_available():
        return False
    import bitsandbytes

    return "multi_backend" in getattr(bitsandbytes, "features", set())


def is_torchvision_available() -> bool:
    return _is_package_available("torchvision")


def is_megatron_lm_available() -> bool:
    return (
        str_to_bool(os.environ.get("ACCELERATE_USE_MEGATRON_LM", "False")) == 1
        and importlib.util.find_spec("megatron") is not None
        and _since("megatron-core", ">=", "0.8.0")
    )


def is_transformers_available() -> bool:
    return _is_package_available("transformers")


def is_datasets_available() -> bool:
    return _is_package_available("datasets")


def is_peft_available() -> bool:
    return _is_package_available("peft")


def is_timm_available() -> bool:
    return _is_package_available("timm")


def is_triton_available() -> bool:
    return _is_package_available("triton", "triton-xpu" if is_xpu_available() else None)


def is_aim_available() -> bool:
    return _since("aim", "<", "4.0.0")


def is_tensorboard_available() -> bool:
    return _is_package_available("tensorboard") or _is_package_available("tensorboardX")


def is_wandb_available() -> bool:
    return _is_package_available("wandb")


def is_comet_ml_available() -> bool:
    return _is_package_available("comet_ml")


def is_swanlab_available() -> bool:
    return _is_package_available("swanlab")


def is_trackio_available() -> bool:
    return _is_package_available("trackio")


def is_boto3_available() -> bool:
    return _is_package_available("boto3")


def is_rich_available() -> bool:
    return _is_package_available("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH", False)


def is_sagemaker_available() -> bool:
    return _is_package_available("sagemaker")


def is_tqdm_available() -> bool:
    return _is_package_available("tqdm")


def is_clearml_available() -> bool:
    return _is_package_available("clearml")


def is_pandas_available() -> bool:
    return _is_package_available("pandas")


def is_matplotlib_available() -> bool:
    return _is_package_available("matplotlib")


def is_mlflow_available() -> bool:
    return _is_package_available("mlflow") or _is_package_available("mlflow", "mlflow-skinny")


def is_mps_available(min_version: str = "1.12") -> bool:
    return (
        is_torch_version(">=", min_version)
        and torch.backends.mps.is_available()
        and torch.backends.mps.is_built()
    )


def is_mlu_available(check_device: bool = False) -> bool:
    return importlib.util.find_spec("torch_mlu") is not None and _device("mlu")


def is_musa_available(check_device: bool = False) -> bool:
    return importlib.util.find_spec("torch_musa") is not None and _device("musa")


def is_npu_available(check_device: bool = False) -> bool:
    return importlib.util.find_spec("torch_npu") is not None and _device("npu")


def is_sdaa_available(check_device: bool = False) -> bool:
    return importlib.util.find_spec("torch_sdaa") is not None and _device("sdaa")


def is_hpu_available(init_hccl: bool = False) -> bool:
    return importlib.util.find_spec("habana_frameworks") is not None and _device("hpu")


def is_habana_gaudi1() -> bool:
    if not is_hpu_available():
        return False
    import habana_frameworks.torch.utils.experimental as htexp

    return bool(htexp._get_device_type() == htexp.synDeviceType.synDeviceGaudi)


def is_ipex_available() -> bool:
    return _is_package_available("intel_extension_for_pytorch")


def is_xpu_available(check_device: bool = False) -> bool:
    return _device("xpu")


def is_neuron_available(check_device: bool = False) -> bool:
    return importlib.util.find_spec("torch_neuronx") is not None and _device("neuron")


def is_dvclive_available() -> bool:
    return _is_package_available("dvclive")


def is_torchdata_available() -> bool:
    return _is_package_available("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    return _since("torchdata", ">=", "0.8.0")


def is_weights_only_available() -> bool:
    return is_torch_version(">=", "2.4.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    return _since("numpy", ">=", min_version)


def _required(package: str, there: Callable[[], bool], function: F) -> F:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not there():
            raise ImportError(f"{function.__name__} needs {package}; install it: pip install {package}")
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def torchao_required(func: F) -> F:
    """Decorator: a call without torchao says what to install."""
    return _required("torchao", is_torchao_available, func)


def deepspeed_required(func: F) -> F:
    """Decorator: a call without deepspeed says what to install."""
    return _required("deepspeed", is_deepspeed_available, func)


USE_TORCH_XLA = str_to_bool(os.environ.get("USE_TORCH_XLA", "true")) == 1

__getattr__ = unserved(__name__)
