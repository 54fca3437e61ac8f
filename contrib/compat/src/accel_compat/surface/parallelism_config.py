"""ParallelismConfig: the sizes of a mesh's dimensions."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from .utils._parallel import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)

_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")


@dataclass
class ParallelismConfig:
    """Ranks of each kind of parallelism; what is not given comes from PARALLELISM_CONFIG_ variables."""

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
        for name in _SIZES:
            if getattr(self, f"{name}_size") is None:
                found = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
                setattr(self, f"{name}_size", int(found))
        self.cp_backend = self.cp_backend or os.environ.get("PARALLELISM_CONFIG_CP_BACKEND", "torch")
        self.sp_backend = self.sp_backend or os.environ.get("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed")
        if self.tp_size > 1 and self.tp_handler is None:  # type: ignore[operator]  # filled above
            self.tp_handler = TorchTensorParallelConfig()
        if self.cp_size > 1 and self.cp_handler is None:  # type: ignore[operator]
            self.cp_handler = TorchContextParallelConfig()
        if self.sp_size > 1 and self.sp_handler is None:  # type: ignore[operator]
            self.sp_handler = DeepSpeedSequenceParallelConfig()
        for name in _SIZES:
            size = getattr(self, f"{name}_size")
            if size < 1 and not (name == "dp_shard" and size == -1):
                raise ValueError(f"{name}_size must be at least 1, but got {size}")
        for kind, known in (("cp", "torch"), ("sp", "deepspeed")):
            if getattr(self, f"{kind}_backend") != known:
                found = getattr(self, f"{kind}_backend")
                raise ValueError(f"{kind}_backend must be one of ['{known}'], but got {found}")
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

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether models are replicated."""
        return self._size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether models are sharded."""
        return self._size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether there is tensor parallelism."""
        return self._size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether there is context parallelism."""
        return self._size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether there is sequence parallelism by DeepSpeed."""
        return self._size("sp") > 1

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the dimensions that are larger than 1."""
        return [name for name in ("dp_replicate", "dp_shard", "cp", "sp", "tp") if self._size(name) > 1]

    @property
    def total_size(self) -> int:
        """Ranks of the world."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that replicate times ranks that shard."""
        return self._size("dp_replicate") * self._size("dp_shard")

    @property
    def non_data_parallel_size(self) -> int:
        """Ranks of all other kinds."""
        return self._size("tp") * self._size("cp") * self._size("sp")

    def _chosen(self, *names: str) -> list[str]:
        return [name for name in names if self._size(name) > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """Dimensions over which data differs."""
        return self._chosen("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The others."""
        return self._chosen("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which weights are sharded."""
        return self._chosen("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which losses are averaged."""
        return self._chosen("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Dimensions that FSDP uses."""
        return [*self._chosen("dp_replicate"), "dp_shard_cp"]

    def _set_size(self, parallelism: str, size: int) -> None:
        if parallelism not in _SIZES:
            raise AssertionError(f"Parallelism must be one of {_SIZES}")
        setattr(self, f"{parallelism}_size", size)

    def _get_mesh(self) -> tuple[Any, ...]:
        """(names, sizes) of torch's mesh; nothing where all are 1."""
        return tuple(zip(*((name, self._size(name)) for name in self.active_mesh_dims), strict=True))

    def build_device_mesh(self, device_type: str) -> Any:
        """torch's mesh of these sizes, with its data dimensions flattened too. Collective.

        A run lays out a mesh of its own: `accelerator.torch_device_mesh`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        named = self._get_mesh()
        if not named or self.sp_enabled:
            return None
        names, sizes = named
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        joint = (
            (self.dp_dim_names, "dp"),
            (self.dp_shard_cp_dim_names, "dp_shard_cp"),
            (self.dp_cp_dim_names, "dp_cp"),
        )
        for dims, name in joint:
            if dims:
                mesh[dims]._flatten(name)  # type: ignore[index]
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The mesh, built at the first call."""
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("You need to pass a device_type e.g cuda to build the device mesh")
            self.device_mesh = self.build_device_mesh(device_type)
        elif device_type not in (None, self.device_mesh.device_type):
            raise ValueError(f"the mesh is on {self.device_mesh.device_type} already, not on {device_type}")
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """The sizes and handlers, for a config file."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "device_mesh"}
