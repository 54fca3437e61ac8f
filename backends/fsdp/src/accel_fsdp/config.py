"""The options of section `fsdp`, under the names they have everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from attrs import frozen

from accel_core import KwargsHandler, option
from accel_fsdp.checks import STRATEGIES, WRAPS, first_problem

__all__ = ["FullyShardedDataParallelPlugin"]

SCHEDULES: Final = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
PREFETCHES: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICTS: Final = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")


def _word(words: Sequence[str], value: Any) -> Any:
    """Return the word of an enum member, a number from 1 on, or a word in any case.

    Else as it is.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(words):
        return words[value - 1]
    name = getattr(value, "name", value)  # torch's enums, without importing them
    return name.upper().lstrip("_") if isinstance(name, str) else value


def _reshard(value: Any) -> Any:
    return value if isinstance(value, int) else _word(STRATEGIES, value)


def _wrap(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _offload(value: Any) -> Any:
    # torch's CPUOffload(offload_params=...), CPUOffloadPolicy and OffloadPolicy
    known = {"CPUOffloadPolicy": True, "OffloadPolicy": False, "NoneType": False}
    return getattr(value, "offload_params", known.get(type(value).__name__, value))


def _fields(value: Any) -> Any:
    # torch's MixedPrecision and MixedPrecisionPolicy, by the names of their fields; without functions that
    # are not given, which the policy of torch 2.15 has a field for.
    policy = vars(value).items() if hasattr(value, "reduce_dtype") else None
    return value if policy is None else {k: v for k, v in policy if v is not None or not k.endswith("_fn")}


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _names(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


@frozen(kw_only=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Options of sharding. Section `fsdp`. Unset options keep FSDP's own defaults."""

    fsdp_version: int = option(
        2, choices=(1, 2), help="2: torch's fully_shard. 1: torch's older FullyShardedDataParallel."
    )
    sharding_strategy: str | None = option(
        None,
        converter=partial(_word, STRATEGIES),
        help=f"One of {', '.join(STRATEGIES)}; reshard_after_forward says the same.",
    )
    reshard_after_forward: bool | int | str | None = option(
        None,
        converter=_reshard,
        help="Drop gathered weights after forward: true, false, to how many ranks, a strategy; unset: true,"
        " in a pipeline false.",
    )
    backward_prefetch: str | None = option(
        None,
        converter=partial(_word, PREFETCHES),
        choices=PREFETCHES,
        help="When backward gathers the next block's weights.",
    )
    mixed_precision_policy: str | Mapping[str, Any] | None = option(
        None,
        converter=_fields,
        help="Dtypes of gathered weights and of reduction: fp32, bf16, fp16, or a mapping; unset: the run's.",
    )
    auto_wrap_policy: str | object | None = option(
        None,
        converter=_wrap,
        help=f"Which modules are sharded each by itself: {', '.join(WRAPS)}, a callable; unset: the"
        " model's own plan.",
    )
    cpu_offload: bool = option(
        False, converter=_offload, help="Keep shards and optimizer state in the CPU's memory."
    )
    ignored_modules: str | Sequence[object] | None = option(
        None,
        converter=_listed,
        help="Modules whose parameters stay whole: a regular expression of names, or the modules.",
    )
    pp_schedule: str = option(
        "1F1B", choices=SCHEDULES, help="Torch's schedule of the stages of parallelism.pp, by its name."
    )
    pp_split_points: Sequence[str] = option(
        (),
        converter=_names,
        help="Modules at which stages but the first begin; unset: the model's, or even cuts.",
    )
    ep_modules: Sequence[str] | None = option(
        None,
        converter=_names,
        help="Patterns of names of modules that are stacks of experts (parallelism.ep); []: there are none."
        " Unset: the modules that the model's ep_plan names, or all that are called experts.",
    )
    state_dict_type: str | None = option(
        None,
        converter=partial(_word, STATE_DICTS),
        choices=STATE_DICTS,
        help="What state_dict() of the prepared model gives; save_state and get_state_dict do not ask.",
    )
    state_dict_config: Any = option(None, python_only=True, help="torch's StateDictConfig, version 1.")
    optim_state_dict_config: Any = option(
        None, python_only=True, help="torch's OptimStateDictConfig, version 1."
    )
    limit_all_gathers: bool = option(True, help="Gather no more than two blocks ahead.")
    use_orig_params: bool | None = option(None, help="Keep the model's own parameters; always true here.")
    param_init_fn: Any = option(
        None, python_only=True, help="Called with each module of a meta model, to fill its own parameters."
    )
    sync_module_states: bool | None = option(
        None, help="Start with rank 0's weights on all ranks; unset: yes. Off only if they are equal already."
    )
    forward_prefetch: bool | None = option(
        None, help="Gather the next block's weights in forward; for models that run blocks in order."
    )
    find_unused_parameters: bool = option(
        False,
        help="Ranks may use different parameters, or others in each step; costs a small reduction per step."
        " Needs torch 2.13.",
    )
    activation_checkpointing: bool = option(
        False, help="Compute a block's activations again in backward instead of keeping them."
    )
    activation_checkpointing_offload: bool = option(
        False, help="Keep what activation checkpointing keeps in the CPU's memory."
    )
    cpu_ram_efficient_loading: bool = option(
        False, help="Only rank 0 builds and loads the model; others get their shards from it."
    )
    transformer_cls_names_to_wrap: Sequence[str] | None = option(
        None, converter=_names, help="Names of the block classes that TRANSFORMER_BASED_WRAP wraps."
    )
    min_num_params: int | None = option(
        None, minimum=1, help="How many parameters a module must have for SIZE_BASED_WRAP."
    )

    def __attrs_post_init__(self) -> None:
        """Refuse options that cannot be, or that one version of FSDP would ignore."""
        if problem := first_problem(self):
            raise ValueError(problem)

    @property
    def strategy(self) -> str:
        """The sharding strategy that both options name between them."""
        again = self.reshard_after_forward
        if isinstance(again, str):
            return again
        if self.sharding_strategy is not None:
            return self.sharding_strategy
        return "SHARD_GRAD_OP" if again is False else "FULL_SHARD"

    @property
    def reshards(self) -> bool | int | None:
        """The argument of torch's fully_shard; None: torch's default (all but the root)."""
        if isinstance(self.reshard_after_forward, (bool, int)):
            return self.reshard_after_forward
        return False if self.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else None

    @property
    def syncs(self) -> bool:
        """True if all ranks start with rank 0's weights."""
        return self.sync_module_states is not False
