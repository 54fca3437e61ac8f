"""The options of section `fsdp`, under the names they have everywhere, and which of them go together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from attrs import fields, frozen

from accel_core import KwargsHandler, option

__all__ = ["FullyShardedDataParallelPlugin"]

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
SCHEDULES: Final = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
WRAPS: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCHES: Final = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICTS: Final = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
POLICY_KEYS: Final[Mapping[int, tuple[str, ...]]] = {
    1: (
        "param_dtype",
        "reduce_dtype",
        "buffer_dtype",
        "keep_low_precision_grads",
        "cast_forward_inputs",
        "cast_root_forward_inputs",
        "_module_classes_to_ignore",
    ),
    2: ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"),
}


def _word(words: Sequence[str], value: Any) -> Any:
    """An enum member's name, a number's word (they count from 1), a word in any case; else as it is."""
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
    # torch's MixedPrecision and MixedPrecisionPolicy, by the names of their fields
    return {**vars(value)} if hasattr(value, "reduce_dtype") else value


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _names(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


@frozen(kw_only=True)
class FullyShardedDataParallelPlugin(KwargsHandler):
    """How models are sharded. Section `fsdp`. An option left out is what torch's FSDP does by itself."""

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
        help="Drop gathered weights after forward: true, false, to how many ranks, or a strategy.",
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
        help=f"Which modules are sharded each by itself: {', '.join(WRAPS)}, a callable.",
    )
    cpu_offload: bool = option(
        False, converter=_offload, help="Keep shards and optimizer state in the CPU's memory."
    )
    ignored_modules: str | Sequence[object] | None = option(
        None,
        converter=_listed,
        help="Modules whose parameters stay whole: a regular expression of names, or the modules.",
    )
    dp_replicate_size: int | None = option(
        None, help="How many copies of the sharded model there are; -1: as many as fit; unset: 1."
    )
    dp_shard_size: int | None = option(
        None, help="Over how many ranks a copy is sharded; unset, -1: over all that are left."
    )
    pp_size: int = option(
        1, help="Over how many ranks the model's layers are spread, in stages; -1: over all that are left."
    )
    pp_schedule: str = option("1F1B", choices=SCHEDULES, help="Torch's schedule of the stages, by its name.")
    pp_split_points: Sequence[str] = option(
        (),
        converter=_names,
        help="Modules at which stages but the first begin; unset: the model's, or even cuts.",
    )
    ep_size: int = option(
        1, help="Over how many ranks the experts of a layer are spread; -1: all that are left."
    )
    ep_modules: Sequence[str] = option(
        ("experts", "*.experts"),
        converter=_names,
        help="Patterns of the names of modules that are stacks of experts; none: this model has no experts.",
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
        """Refuse what cannot be, or what one version of FSDP would ignore without a word."""
        problem = next(filter(None, (check(self) for check in _CHECKS)), None)
        if problem:
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
        """What torch's fully_shard takes; None leaves it to torch (all but the root)."""
        if isinstance(self.reshard_after_forward, (bool, int)):
            return self.reshard_after_forward
        return False if self.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else None

    @property
    def syncs(self) -> bool:
        """Whether all ranks start with rank 0's weights."""
        return self.sync_module_states is not False


Config = FullyShardedDataParallelPlugin


def _kinds(config: Config) -> str | None:
    # The word "False" would be true.
    for field in fields(Config):
        value, kinds = getattr(config, field.name), set(str(field.type).split(" | "))
        if kinds <= {"bool", "int", "str", "None"} and type(value).__name__.removesuffix("Type") not in kinds:
            return f"{field.name}: expected {field.type}, got {value!r}"
    return None


def _one_strategy(config: Config) -> str | None:
    again, named = config.reshard_after_forward, config.sharding_strategy
    if isinstance(again, int) and not isinstance(again, bool) and again < 1:
        return f"reshard_after_forward: expected true, false, a strategy, or a number of ranks, got {again}"
    for key, word in (("sharding_strategy", named), ("reshard_after_forward", again)):
        if isinstance(word, str) and word not in STRATEGIES:
            near = difflib.get_close_matches(word, STRATEGIES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"{key}: expected one of {', '.join(STRATEGIES)}, got {word!r}{hint}"
    if named is None or again is None or again == named:
        return None
    keeps = named in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD")
    if isinstance(again, str) or bool(again) is keeps:
        return f"sharding_strategy {named} and reshard_after_forward {again!r} say different things; set one"
    return None


def _not_in_1(config: Config) -> str | None:
    if config.fsdp_version != 1:
        return None
    again = config.reshard_after_forward
    if isinstance(again, int) and not isinstance(again, bool):
        return (
            f"reshard_after_forward: {again} is for fsdp_version 2; version 1 takes true, false, a strategy"
        )
    if config.activation_checkpointing_offload:
        return "activation_checkpointing_offload is for fsdp_version 2"
    if config.pp_size != 1:
        return "pp_size is for fsdp_version 2"
    if config.ep_size != 1:
        return "ep_size is for fsdp_version 2"
    if config.use_orig_params is False:
        return (
            "use_orig_params: false would give optimizers flat parameters without names, which have no"
            " groups and cannot be saved by name; leave it out, weights are stored flat all the same"
        )
    return None


def _not_in_2(config: Config) -> str | None:
    if config.fsdp_version != 2:
        return None
    wrong = {
        "sharding_strategy: NO_SHARD": config.strategy == "NO_SHARD",
        f"backward_prefetch: {config.backward_prefetch}": config.backward_prefetch
        not in (None, "BACKWARD_PRE"),
        "limit_all_gathers: false": not config.limit_all_gathers,
        "use_orig_params: false": config.use_orig_params is False,
        "state_dict_config": config.state_dict_config is not None,
        "optim_state_dict_config": config.optim_state_dict_config is not None,
    }
    named = next((name for name, given in wrong.items() if given), None)
    return None if named is None else f"{named} is for fsdp_version 1; leave it out, or set fsdp_version: 1"


def _wrapping(config: Config) -> str | None:
    policy = config.auto_wrap_policy
    takes_modules = callable(policy) or hasattr(policy, "_run_policy")
    if policy is not None and policy not in WRAPS and not takes_modules:
        near = difflib.get_close_matches(str(policy), WRAPS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"auto_wrap_policy: expected one of {', '.join(WRAPS)}, or a callable, got {policy!r}{hint}"
    if config.transformer_cls_names_to_wrap and policy not in (None, "TRANSFORMER_BASED_WRAP"):
        return (
            f"transformer_cls_names_to_wrap goes with TRANSFORMER_BASED_WRAP, not auto_wrap_policy {policy}"
        )
    if config.min_num_params is not None and policy not in (None, "SIZE_BASED_WRAP"):
        return f"min_num_params goes with SIZE_BASED_WRAP, not auto_wrap_policy {policy}"
    if config.min_num_params is not None and config.transformer_cls_names_to_wrap:
        return "min_num_params and transformer_cls_names_to_wrap are two ways to wrap; set one"
    if policy == "SIZE_BASED_WRAP" and config.min_num_params is None:
        return "auto_wrap_policy SIZE_BASED_WRAP needs min_num_params"
    return None


def _policy(config: Config) -> str | None:
    policy: Any = config.mixed_precision_policy
    if isinstance(policy, str) and policy not in DTYPES:
        return f"mixed_precision_policy: expected one of {', '.join(DTYPES)}, got {policy!r}"
    if policy is not None and not isinstance(policy, (str, Mapping)):
        kinds = f"{', '.join(DTYPES)}, a mapping, or torch's policy"
        return f"mixed_precision_policy: expected one of {kinds}, got {policy!r}"
    if not isinstance(policy, Mapping):
        return None
    keys = POLICY_KEYS[config.fsdp_version]
    odd = next((key for key in policy if key not in keys), None)
    if odd is not None:
        return (
            f"mixed_precision_policy of fsdp_version {config.fsdp_version} has {', '.join(keys)}, not {odd}"
        )
    known = {*DTYPES, *DTYPES.values()}
    for key, value in policy.items():
        name = str(value).removeprefix("torch.")
        if key.endswith("_dtype") and value is not None and name not in known:
            return f"mixed_precision_policy: {key} is one of {', '.join(sorted(known))}, not {value!r}"
        if key.startswith(("cast", "keep")) and not isinstance(value, bool):
            return f"mixed_precision_policy: {key} is true or false, not {value!r}"
    return None


def _going_together(config: Config) -> str | None:
    if config.state_dict_type == "LOCAL_STATE_DICT":
        return "state_dict_type: LOCAL_STATE_DICT is not given over a device mesh; take SHARDED_STATE_DICT"
    if config.activation_checkpointing_offload and not config.activation_checkpointing:
        return "activation_checkpointing_offload needs activation_checkpointing"
    if config.cpu_ram_efficient_loading and not config.syncs:
        return "cpu_ram_efficient_loading needs sync_module_states: other ranks get their weights from rank 0"
    return None


_CHECKS: Final = (_kinds, _one_strategy, _not_in_1, _not_in_2, _wrapping, _policy, _going_together)
