"""Accelerate's config files, as objects with its keys for attributes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from accel_compat.configs.enums import MULTI, ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_compat.environment.constants import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accel_compat.launch.convert import FP8, serves_fp8
from accel_compat.notices import warn_once
from accel_compat.settings import SECTIONS, WORDS

if TYPE_CHECKING:
    from typing_extensions import Self


hf_cache_home = os.path.expanduser(
    os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
)
cache_dir = os.path.join(hf_cache_home, "accelerate")
default_config_file = os.path.join(cache_dir, "default_config.yaml")
default_json_config_file = default_yaml_config_file = default_config_file  # one file there too


@dataclass
class BaseConfig:
    """Keys of every config file."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str | None
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        cloud = self.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
        kinds: Any = SageMakerDistributedType if cloud else DistributedType
        self.distributed_type = kinds(self.distributed_type)
        for name in (field.name for field in fields(self) if field.name in SECTIONS):
            if getattr(self, name) is None:
                setattr(self, name, {})

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that are set, with plain values."""
        plain = {name: _plain(value) for name, value in self.__dict__.items()}
        return {name: value for name, value in plain.items() if value is not None}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Bring a config of older releases up to date, in place."""
        if "distributed_type" not in config_dict:
            raise ValueError("A `distributed_type` must be specified in the config file.")
        if config_dict["distributed_type"] is False:  # what YAML makes of a bare NO
            config_dict["distributed_type"] = "NO"
        half = config_dict.pop("fp16", False)
        here = ComputeEnvironment.LOCAL_MACHINE
        local = config_dict.setdefault("compute_environment", here) == here
        if local and config_dict["distributed_type"] == DistributedType.NO:
            config_dict.setdefault("num_processes", 1)
        config_dict.setdefault("mixed_precision", "fp16" if half else None)
        if "dynamo_backend" in config_dict:
            backend = config_dict.pop("dynamo_backend")
            config_dict["dynamo_config"] = {} if backend == "NO" else {"dynamo_backend": backend}
        for switch in ("use_cpu", "debug", "enable_cpu_affinity"):
            config_dict.setdefault(switch, False)
        return config_dict

    @classmethod
    def _made(cls, found: dict[str, Any], file: Any) -> Self:
        found = cls.process_config(found)
        extra = sorted(found.keys() - {field.name for field in fields(cls)})
        if extra:
            raise ValueError(
                f"The config file at {file} had unknown keys ({extra}), please try upgrading your"
                " `accelerate` version or fix (and potentially remove) these keys from your config file."
            )
        return cls(**found)

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> Self:
        """Load a JSON file."""
        file = json_file or default_json_config_file
        return cls._made(json.loads(Path(file).read_text(encoding="utf-8")), file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> Self:
        """Load a YAML file."""
        file = yaml_file or default_yaml_config_file
        return cls._made(yaml.safe_load(Path(file).read_text(encoding="utf-8")), file)

    def to_json_file(self, json_file: str) -> None:
        """Write it."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        Path(json_file).write_text(text, encoding="utf-8")

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write it."""
        Path(yaml_file).write_text(yaml.safe_dump(self.to_dict()), encoding="utf-8")


@dataclass
class ClusterConfig(BaseConfig):
    """Of machines that one starts the workers on oneself."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None


@dataclass
class SageMakerConfig(BaseConfig):
    """Of jobs in a cloud, which `accelerate launch` hands over by accel-sagemaker."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """Load a config file; default: `default_config_file`.

    Raises:
        FileNotFoundError: it was named, and is not there.
    """
    if config_file is not None and not os.path.isfile(config_file):
        raise FileNotFoundError(
            f"The passed configuration file `{config_file}` does not exist. Please pass an existing file."
        )
    file = str(config_file or default_config_file)
    with Path(file).open(encoding="utf-8") as opened:  # YAML's errors name an open file
        found: dict[str, Any] = json.load(opened) if file.endswith(".json") else yaml.safe_load(opened)
    here = ComputeEnvironment.LOCAL_MACHINE
    local = found.get("compute_environment", here) == here
    return (ClusterConfig if local else SageMakerConfig)._made(found, file)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()} or None
    return value.value if isinstance(value, Enum) else value


def write_basic_config(
    mixed_precision: str = "no", save_location: str = default_json_config_file
) -> Path | Literal[False]:
    """Write what this machine has, for one machine; False if there is a file already."""
    import torch

    path = Path(save_location)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        print(f"Configuration already exists at {save_location}, will not override.")  # noqa: T201  as there
        return False
    if mixed_precision.lower() not in WORDS["mixed_precision"]:
        raise ValueError(
            "`mixed_precision` should be one of 'no', 'fp16', 'bf16', or 'fp8'. Received"
            f" {mixed_precision.lower()}"
        )
    if mixed_precision.lower() == "fp8" and not serves_fp8():
        warn_once(FP8)
    kind = torch.accelerator.current_accelerator(check_available=True)
    count = 1 if kind is None else torch.accelerator.device_count()
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": mixed_precision.lower(),
        "num_processes": count,
        "use_cpu": kind is None,
        "distributed_type": "NO" if kind is None or count == 1 else MULTI[kind.type].value,
        "debug": False,
        "enable_cpu_affinity": False,
    }
    ClusterConfig(**config).to_json_file(str(path))
    return path
