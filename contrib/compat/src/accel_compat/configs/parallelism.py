"""Tensor, context and sequence parallelism, and the sizes of a mesh's dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from accel_compat.configs.translation import Translated
from accel_compat.settings import fill_from_settings

_START = "parallelism_config_"
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


@dataclass
class TorchTensorParallelPlugin(Translated):
    """Degree of tensor parallelism."""

    ours: ClassVar[str] = "accel_fsdp:TorchTensorParallelPlugin"

    tp_size: int = 1
    torch_device_mesh: Any = None


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism."""

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """The way in which context-parallel ranks get each other's keys and values."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        fill_from_settings(self, _START, "cp_comm_strategy")
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ValueError(
                f"Invalid cp_comm_strategy: {self.cp_comm_strategy}. Supported strategies are 'allgather' or"
                " 'alltoall'."
            )


@dataclass
class DeepSpeedSequenceParallelConfig:
    """The way in which DeepSpeed's Ulysses splits sequences."""

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        fill_from_settings(self, _START, "sp_seq_length_is_variable", "sp_attn_implementation")
        kernels = (None, "flash_attention_2", "flash_attention_3", "sdpa")
        if self.sp_attn_implementation not in kernels and "/" not in str(self.sp_attn_implementation):
            raise ValueError(
                f"Invalid sp_attn_implementation: {self.sp_attn_implementation}. Supported are 'sdpa',"
                " 'flash_attention_2', 'flash_attention_3' and kernels of the hub"
            )


_HANDLERS = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}


def _enabled(name: str) -> Any:
    return property(lambda self: self._size(name) > 1, doc=f"Whether {name}_size is more than 1.")


def _larger(*names: str) -> Any:
    doc = f"Those of the dimensions {', '.join(names)} that have more than one rank."
    return property(lambda self: [name for name in names if self._size(name) > 1], doc=doc)


def _product(*names: str) -> Any:
    doc = f"Ranks of the dimensions {', '.join(names)} together."
    return property(lambda self: math.prod(map(self._size, names)), doc=doc)


@dataclass
class ParallelismConfig:
    """Number of ranks of each kind of parallelism.

    PARALLELISM_CONFIG_ variables fill fields that are not given.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    device_mesh: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [f"{name}_size" for name in _SIZES]
        fill_from_settings(self, _START, *sizes, "cp_backend", "sp_backend")
        for name in _SIZES:
            size = getattr(self, f"{name}_size")
            if type(size) is not int:
                raise TypeError(f"{name}_size is {size!r}, not a whole number\ngive the number of ranks")
            if size < 1:
                raise ValueError(f"{name}_size must be at least 1, but got {size}")
        for name, handler in _HANDLERS.items():
            if self._size(name) > 1 and getattr(self, f"{name}_handler") is None:
                setattr(self, f"{name}_handler", handler())
        for kind, only in (("cp", "torch"), ("sp", "deepspeed")):
            if (backend := getattr(self, f"{kind}_backend")) != only:
                raise ValueError(f"{kind}_backend must be one of ['{only}'], but got {backend}")
        if self.cp_enabled and self.sp_enabled:
            raise ValueError(
                "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive. Got"
                f" cp_size={self.cp_size} and sp_size={self.sp_size}. Please set one of them to 1."
            )
        if (self.tp_enabled or self.cp_enabled) and self.dp_replicate_enabled and self.dp_shard_size == 1:
            raise ValueError(
                "Tensor/Context parallelism (tp/cp_size > 1) cannot be used with pure data parallelism"
                " (dp_replicate_size > 1 and dp_shard_size == 1). Please set dp_shard_size > 1."
            )

    def _size(self, name: str) -> int:
        return int(getattr(self, f"{name}_size"))

    dp_replicate_enabled = _enabled("dp_replicate")
    dp_shard_enabled = _enabled("dp_shard")
    tp_enabled = _enabled("tp")
    cp_enabled = _enabled("cp")
    sp_enabled = _enabled("sp")
    active_mesh_dims = _larger("dp_replicate", "dp_shard", "cp", "sp", "tp")
    dp_dim_names = _larger("dp_replicate", "dp_shard")
    non_dp_dim_names = _larger("tp", "cp", "sp")
    dp_shard_cp_dim_names = _larger("dp_shard", "cp")
    dp_cp_dim_names = _larger("dp_replicate", "dp_shard", "cp")
    total_size = _product(*_SIZES)
    data_parallel_size = _product("dp_replicate", "dp_shard")
    non_data_parallel_size = _product("tp", "cp", "sp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions that FSDP uses."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    def _set_size(self, parallelism: str, size: int) -> None:
        if parallelism not in _SIZES:
            raise AssertionError(f"Parallelism must be one of {_SIZES}")
        setattr(self, f"{parallelism}_size", size)

    def _get_mesh(self) -> tuple[Any, ...]:
        """Give (names, sizes) of torch's mesh; nothing where all sizes are 1."""
        return tuple(zip(*((name, self._size(name)) for name in self.active_mesh_dims), strict=True))

    def build_device_mesh(self, device_type: str) -> Any:
        """Make torch's mesh of these sizes, with its data dimensions flattened too.

        Collective. Returns None if all sizes are 1, or under sequence parallelism.

        A run lays out a mesh of its own: `accelerator.torch_device_mesh`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        named = self._get_mesh()
        if not named or self.sp_enabled:
            return None
        names, sizes = named
        return self.name_joint(init_device_mesh(device_type, sizes, mesh_dim_names=names))

    def name_joint(self, mesh: Any) -> Any:
        """Name the joint dimensions of a mesh, as Accelerate's programs do. Collective."""
        joint = {
            "dp": self.dp_dim_names,
            "dp_shard_cp": self.dp_shard_cp_dim_names,
            "dp_cp": self.dp_cp_dim_names,
        }
        for name, dims in joint.items():
            if dims:
                mesh[dims]._flatten(name)
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh, built at the first call."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("You need to pass a device_type e.g cuda to build the device mesh")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise ValueError(f"the mesh is on {self.device_mesh.device_type} already, not on {device_type}")
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Return the sizes and handlers, for a config file."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "device_mesh"}
