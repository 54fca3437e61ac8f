"""The flags of `accelerate launch`: their spellings, kinds and defaults, and which of them were given."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Final, NoReturn

from accel_compat.fields import FIELDS, described

__all__ = ["DEEPSPEED", "DEFAULTS", "LAUNCHING", "SWITCHES", "given", "launch_parser"]

SWITCHES: Final = (
    "cpu",
    "multi_gpu",
    "tpu",
    "enable_cpu_affinity",
    "dynamo_use_fullgraph",
    "dynamo_use_dynamic",
    "dynamo_use_regional_compilation",
    "use_deepspeed",
    "use_fsdp",
    "use_parallelism_config",
    "use_megatron_lm",
    "same_network",
    "downcast_bf16",
    "debug",
    "quiet",
    "no_python",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "fp8_use_autocast_during_eval",
)
UNSET: Final = ("debug", "quiet", "no_python")
"""Switches that are None, not False, where they were not given."""
LAUNCHING: Final = (
    "num_processes",
    "num_machines",
    "num_cpu_threads_per_process",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "max_restarts",
    "gpu_ids",
    "mixed_precision",
)
DEEPSPEED: Final[Mapping[str, str]] = {
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""Setting -> the variable that DeepSpeedPlugin reads."""

_TRUTHS: Final = ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim")
DEFAULTS: Final[Mapping[str, Any]] = {
    "dynamo_mode": "default",
    "tee": "0",
    "role": "default",
    "rdzv_backend": "static",
    "rdzv_conf": "",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "fsdp_version": "1",
    "fsdp_min_num_params": 100_000_000,
    "fsdp_sharding_strategy": "FULL_SHARD",
    **dict.fromkeys(("fsdp_reshard_after_forward", "fsdp_use_orig_params"), "true"),
    **dict.fromkeys(("fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"), "true"),
    **dict.fromkeys(("fsdp_offload_params", "fsdp_forward_prefetch"), "false"),
    **dict.fromkeys(("fsdp_activation_checkpointing", "fsdp_activation_checkpointing_offload"), "false"),
    "megatron_lm_tp_degree": 1,
    "megatron_lm_pp_degree": 1,
    "megatron_lm_gradient_clipping": 1.0,
    **{
        f"megatron_lm_{name}": False
        for name in (
            "use_custom_fsdp",
            "no_load_optim",
            "no_save_optim",
            "eod_mask_loss",
            "overlap_cpu_optimizer_d2h_h2d",
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
        )
    },
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_format": "HYBRID",
    "fp8_amax_history_len": 1024,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_override_linear_precision": (False, False, False),
    "fp8_opt_level": "O2",
    **dict.fromkeys(_TRUTHS, 1),
    **{f"parallelism_config_{dim}_size": 1 for dim in ("dp_replicate", "dp_shard", "tp", "cp", "sp")},
    "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather",
    "parallelism_config_sp_backend": "deepspeed",
    "parallelism_config_sp_seq_length_is_variable": True,
    "parallelism_config_sp_attn_implementation": "sdpa",
}
_WHOLE: Final = ("num_processes", "num_machines", "num_cpu_threads_per_process", "machine_rank")
_KINDS: Final[Mapping[str, Any]] = {
    **dict.fromkeys((*_WHOLE, "main_process_port", "zero_stage", "gradient_accumulation_steps"), int),
    **dict.fromkeys(
        (
            f"megatron_lm_{name}"
            for name in (
                "decoder_last_pipeline_num_layers",
                "num_micro_batches",
                "recompute_num_layers",
                "expert_model_parallel_size",
                "context_parallel_size",
                "expert_tensor_parallel_size",
            )
        ),
        int,
    ),
    **{name: type(value) for name, value in DEFAULTS.items() if type(value) in (int, float)},
    **dict.fromkeys(_TRUTHS, str),
    **dict.fromkeys(
        ("gradient_clipping", "megatron_lm_attention_dropout", "megatron_lm_hidden_dropout"), float
    ),
}


class _Given(argparse.Action):
    """Stores a value, and notes that it was given: a default counts for less than the config file."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}


class _Underscored(argparse.HelpFormatter):
    def add_argument(self, action: argparse.Action) -> None:
        shown = copy(action)
        shown.option_strings = [each for each in action.option_strings if "-" not in each[2:]]
        super().add_argument(shown)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in a line, and what was meant; the flags are too many to be shown each time."""

    def error(self, message: str) -> NoReturn:
        unknown = [word for word in message.split() if word.startswith("--")]
        known = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near and near[0] not in unknown else ""
        self.exit(2, f"{self.prog}: {message}{hint}\n`{self.prog} --help` lists the flags\n")


def launch_parser(others: Mapping[str, str]) -> argparse.ArgumentParser:
    """The flags of `accelerate launch`. `others`: what has no meaning here -> why."""
    parser = _Parser(
        "accel compat launch",
        description="Start a script written for Accelerate, by accelerate launch's own flags, spelled with"
        " underscores or with hyphens (`--num-processes=2`).",
        allow_abbrev=False,
        formatter_class=_Underscored,
    )
    _switch(parser, ["-m", "--module"], "module", None, help=described("module", others))
    for name in SWITCHES:
        default, short = None if name in UNSET else False, ["-q"] if name == "quiet" else []
        flag = name.replace("tpu_use_cluster", "tpu_cluster")
        _switch(parser, [*_spellings(flag), *short], name, default, help=described(name, others))
    parser.add_argument(
        *_spellings("no_tpu_cluster"), dest="tpu_use_cluster", action=_Given, nargs=0, const=False
    )
    names = ("config_file", *LAUNCHING, *DEEPSPEED, *_fields(), *others)
    for name in dict.fromkeys(name for name in names if name not in SWITCHES):
        parser.add_argument(
            *_spellings(name),
            action=_Given,
            metavar="VALUE",
            default=DEFAULTS.get(name),
            type=_KINDS.get(name, str),
            choices=("no", "fp16", "bf16", "fp8") if name == "mixed_precision" else None,
            help=described(name, others),
        )
    parser.add_argument("training_script", action=_Given)
    parser.add_argument("training_script_args", action=_Given, nargs=argparse.REMAINDER)
    return parser


def given(read: argparse.Namespace) -> dict[str, Any]:
    """What the command line said, or the program that changed what was parsed."""
    noted: Iterable[str] = getattr(read, "nondefault", ())
    return {
        name: value
        for name, value in vars(read).items()
        if name != "nondefault" and (name in noted or value not in (None, False, DEFAULTS.get(name)))
    }


def _switch(
    parser: argparse.ArgumentParser, flags: Sequence[str], name: str, default: Any, **more: Any
) -> None:
    parser.add_argument(*flags, dest=name, action=_Given, nargs=0, const=True, default=default, **more)


def _fields() -> Iterator[str]:
    for prefix, names in FIELDS.items():
        yield from (f"{prefix}{name}" for name in names)


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))
