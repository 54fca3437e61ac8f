"""Checks for options of section `fsdp` that are wrong or that FSDP would ignore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

from attrs import fields

from accel_fsdp.naming import did_you_mean

Config: TypeAlias = Any
"""A FullyShardedDataParallelPlugin; its module imports this one."""

__all__ = ["DTYPES", "STRATEGIES", "WRAPS", "first_problem", "refused_sizes"]

STRATEGIES: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
WRAPS: Final = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
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


def first_problem(config: Config) -> str | None:
    """Return the first problem of the config and its remedy; None if there is none."""
    of_version = {1: _not_in_1, 2: _not_in_2}[config.fsdp_version]
    checks = (_kinds, _one_strategy, of_version, _wrapping, _policy, _going_together)
    return next(chain.from_iterable(check(config) for check in checks), None)


def _kinds(config: Config) -> Iterator[str]:
    # The word "False" would be true.
    for field in fields(type(config)):
        value, kinds = getattr(config, field.name), set(str(field.type).split(" | "))
        if kinds <= {"bool", "int", "str", "None"} and type(value).__name__.removesuffix("Type") not in kinds:
            yield f"{field.name}: expected {field.type}, got {value!r}"


def _one_strategy(config: Config) -> Iterator[str]:
    again, named = config.reshard_after_forward, config.sharding_strategy
    if type(again) is int and again < 1:
        yield f"reshard_after_forward: expected true, false, a strategy, or a number of ranks, got {again}"
    for key, word in (("sharding_strategy", named), ("reshard_after_forward", again)):
        if isinstance(word, str) and word not in STRATEGIES:
            yield _unknown(key, STRATEGIES, "", word)
    if named is None or again is None or again == named:
        return
    keeps = named in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD")
    if isinstance(again, str) or bool(again) is keeps:
        yield f"sharding_strategy {named} and reshard_after_forward {again!r} say different things; set one"


def _not_in_1(config: Config) -> Iterator[str]:
    wrong = {
        f"reshard_after_forward: {config.reshard_after_forward}": type(config.reshard_after_forward) is int,
        "activation_checkpointing_offload": config.activation_checkpointing_offload,
        "find_unused_parameters": config.find_unused_parameters,
    }
    yield from (f"{name} is for fsdp_version 2" for name, given in wrong.items() if given)
    if config.use_orig_params is False:
        yield (
            "use_orig_params: false would give optimizers flat parameters without names, which have no"
            " groups and cannot be saved by name; leave it out, weights are stored flat all the same"
        )


def _not_in_2(config: Config) -> Iterator[str]:
    prefetch = config.backward_prefetch
    wrong = {
        "sharding_strategy: NO_SHARD": config.strategy == "NO_SHARD",
        f"backward_prefetch: {prefetch}": prefetch not in (None, "BACKWARD_PRE"),
        "limit_all_gathers: false": not config.limit_all_gathers,
        "use_orig_params: false": config.use_orig_params is False,
        "state_dict_config": config.state_dict_config is not None,
        "optim_state_dict_config": config.optim_state_dict_config is not None,
    }
    advice = "leave it out, or set fsdp_version: 1"
    yield from (f"{name} is for fsdp_version 1; {advice}" for name, given in wrong.items() if given)


def _wrapping(config: Config) -> Iterator[str]:
    policy, names, size = (
        config.auto_wrap_policy,
        config.transformer_cls_names_to_wrap,
        config.min_num_params,
    )
    if policy is not None and policy not in WRAPS and not callable(policy):
        yield _unknown("auto_wrap_policy", WRAPS, ", or a callable", policy)
    for option, word in (("transformer_cls_names_to_wrap", WRAPS[0]), ("min_num_params", WRAPS[1])):
        if getattr(config, option) and policy not in (None, word):
            yield f"{option} goes with {word}, not auto_wrap_policy {policy}"
    if size is not None and names:
        yield "min_num_params and transformer_cls_names_to_wrap are two ways to wrap; set one"
    if policy == "SIZE_BASED_WRAP" and size is None:
        yield "auto_wrap_policy SIZE_BASED_WRAP needs min_num_params"


def _policy(config: Config) -> Iterator[str]:
    policy: Any = config.mixed_precision_policy
    if not isinstance(policy, Mapping):
        if policy is not None and policy not in DTYPES:
            yield _unknown("mixed_precision_policy", [*DTYPES], ", a mapping, or torch's policy", policy)
        return
    keys, known = POLICY_KEYS[config.fsdp_version], {*DTYPES, *DTYPES.values()}
    for key, value in policy.items():
        name = str(value).removeprefix("torch.")
        if key not in keys:
            version = f"mixed_precision_policy of fsdp_version {config.fsdp_version}"
            yield f"{version} has {', '.join(keys)}, not {key}"
        if key.endswith("_dtype") and value is not None and name not in known:
            yield f"mixed_precision_policy: {key} is one of {', '.join(sorted(known))}, not {value!r}"
        if key.startswith(("cast", "keep")) and not isinstance(value, bool):
            yield f"mixed_precision_policy: {key} is true or false, not {value!r}"


def _going_together(config: Config) -> Iterator[str]:
    if config.state_dict_type == "LOCAL_STATE_DICT":
        yield "state_dict_type: LOCAL_STATE_DICT is not given over a device mesh; take SHARDED_STATE_DICT"
    if config.activation_checkpointing_offload and not config.activation_checkpointing:
        yield "activation_checkpointing_offload needs activation_checkpointing"
    if config.cpu_ram_efficient_loading and not config.syncs:
        yield "cpu_ram_efficient_loading needs sync_module_states: other ranks get their weights from rank 0"


def refused_sizes(config: Config, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the reasons why sizes of section `parallelism` do not go with section `fsdp`."""
    wide = [name for name in ("pp", "ep") if sizes.get(name, 1) != 1]
    if config.fsdp_version == 1:
        yield from (f"parallelism.{name} is for fsdp_version 2\nset fsdp.fsdp_version: 2" for name in wide)
    for name, size in (("pp_schedule", "pp"), ("pp_split_points", "pp"), ("ep_modules", "ep")):
        if size not in wide and getattr(config, name) != getattr(fields(type(config)), name).default:
            yield f"fsdp.{name} goes with parallelism.{size}, which is 1\nset that size, or leave {name} out"
    if config.strategy.startswith("HYBRID") and sizes.get("dp_replicate") == 1:
        yield (
            f"fsdp.sharding_strategy {config.strategy} asks for copies of the model, and"
            " parallelism.dp_replicate is 1\nset one of them"
        )
    if "ep" in wide and sizes.get("cp", 1) != 1:
        yield "parallelism.ep and parallelism.cp are not served together\nset one of them to 1"


def _unknown(option: str, words: Sequence[str], others: str, given: object) -> str:
    return f"{option}: expected one of {', '.join(words)}{others}, got {given!r}{did_you_mean(given, words)}"
