"""The options of section `deepspeed`.

DeepSpeed's JSON, and options that are commonly set without a JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen

from accel_core import KwargsHandler, Proposal, RunConfig, option
from accel_deepspeed import settings

__all__ = ["DeepSpeedPlugin"]

_PLACES: Final = ("none", "cpu", "nvme")
_MSAMP: Final = "MS-AMP is no longer maintained, and is not supported; leave it out"
_PATHS: Final = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
"""Option -> its place in DeepSpeed's JSON."""


@frozen(kw_only=True)
class DeepSpeedPlugin(KwargsHandler):
    """Options of DeepSpeed, beside or instead of its JSON. Section `deepspeed`.

    "auto" in the JSON is filled in as it becomes known: from these options, the run, or what is prepared.
    """

    hf_ds_config: str | Mapping[str, Any] | None = option(
        None, converter=settings.read, help="DeepSpeed's settings: a mapping, or the path of a JSON file."
    )
    gradient_accumulation_steps: int | Literal["auto"] | None = option(
        None, minimum=1, help="Micro-batches a step; unset: the run's."
    )
    gradient_clipping: float | Literal["auto"] | None = option(
        None, minimum=0, help="Clip each step to this norm; unset: only what clip_grad_norm_ asks for."
    )
    clip_unasked: float = option(
        0.0,
        minimum=0,
        help="Without gradient_clipping: clip to this norm each step that clip_grad_norm_ asks nothing of.",
    )
    zero_stage: int | None = option(
        None, choices=(0, 1, 2, 3), help="What is sharded; unset: the JSON's, 2 without JSON."
    )
    is_train_batch_min: bool = option(
        True, help="The smallest loader's batch size counts, or the largest's, where several are prepared."
    )
    offload_optimizer_device: str | None = option(None, choices=_PLACES, help="Where optimizer state lives.")
    offload_param_device: str | None = option(None, choices=_PLACES, help="Where weights live (stage 3).")
    offload_optimizer_nvme_path: str | None = option(None, help="Folder for optimizer state on NVMe.")
    offload_param_nvme_path: str | None = option(None, help="Folder for weights on NVMe.")
    zero3_init_flag: bool | None = option(
        None, help="Shard models while they are built, in model_init_context; unset: in stage 3."
    )
    zero3_save_16bit_model: bool | None = option(
        None, help="Let DeepSpeed's own save_16bit_model gather stage 3's weights."
    )
    transformer_moe_cls_names: str | None = option(
        None, help="Classes of layers whose parts are fetched together in stage 3, comma separated."
    )
    enable_msamp: bool | None = option(None, refused=True, help=_MSAMP)
    msamp_opt_level: str | None = option(None, refused=True, help=_MSAMP)

    def __attrs_post_init__(self) -> None:
        """Refuse all contradictions at once."""
        problems = [*self._contradictions(), *self._misplaced()]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's settings.

        A copy of the JSON, with these options for keys that are "auto" or absent.
        """
        made = settings.read(self.hf_ds_config) or {}
        for name, path in _PATHS.items():
            value = getattr(self, name)
            if value is not None:
                settings.put(made, path, value)
        if self.hf_ds_config is None and self.zero_stage is None:
            settings.put(made, "zero_optimization.stage", 2)
        return made

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(settings.get(self.deepspeed_config, "zero_optimization.stage", 0))

    @property
    def shards_init(self) -> bool:
        """True if models are sharded while they are built."""
        return self.stage == 3 if self.zero3_init_flag is None else self.zero3_init_flag

    def propose(self, run: RunConfig) -> Sequence[Proposal]:
        """Return the JSON's settings of the run: micro-batches per step, precision."""
        made = self.deepspeed_config
        steps = made.get("gradient_accumulation_steps", settings.AUTO)
        found = []
        if steps != settings.AUTO:
            found.append(Proposal("gradient_accumulation_steps", steps, "its gradient_accumulation_steps"))
        found += [
            Proposal("mixed_precision", name, f"its {name}.enabled")
            for name in ("fp16", "bf16")
            if settings.get(made, f"{name}.enabled") is True
        ]
        return found

    # -- contradictions -------------------------------------------------------------------------

    def _contradictions(self) -> list[str]:
        given = self.hf_ds_config if isinstance(self.hf_ds_config, Mapping) else {}
        found = []
        for name, path in _PATHS.items():
            value, there = getattr(self, name), settings.get(given, path)
            if not (value is None or there in (None, settings.AUTO, value)):
                found.append(f"{name} is {value!r}, but {path} in hf_ds_config is {there!r}; give one")
        return found

    def _misplaced(self) -> list[str]:
        found: list[str] = []
        made, stage = self.deepspeed_config, settings.get(self.deepspeed_config, "zero_optimization.stage", 0)
        if stage not in (0, 1, 2, 3):
            return [*found, f"zero_optimization.stage is {stage!r}; ZeRO has stages 0, 1, 2 and 3"]
        if stage != 3:
            wanting = ("offload_param_device", "zero3_init_flag", "zero3_save_16bit_model")
            asked = [name for name in wanting if getattr(self, name) not in (None, False, "none")]
            found += [f"{name} needs ZeRO stage 3, and zero_stage is {stage}" for name in asked]
        if stage == 0 and self.offload_optimizer_device not in (None, "none"):
            found.append("offload_optimizer_device needs ZeRO stage 1, 2 or 3, and zero_stage is 0")
        if stage < 2 and settings.get(made, "zero_optimization.overlap_comm"):
            found.append(f"overlap_comm needs ZeRO stage 2 or 3, and zero_stage is {stage}; leave it out")
        for what in ("offload_optimizer", "offload_param"):
            place = settings.get(made, f"zero_optimization.{what}.device")
            folder = settings.get(made, f"zero_optimization.{what}.nvme_path")
            if (place == "nvme") != (folder is not None) and place != settings.AUTO:
                found.append(
                    f"{what}_device is {place!r} and {what}_nvme_path {folder!r}; give both, or neither"
                )
        return found
