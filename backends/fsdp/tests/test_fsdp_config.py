"""What section `fsdp` takes, and what it refuses by name; what of a model no option matches."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_problem import GPT, accelerator, net, plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.utils.data import DataLoader, TensorDataset

from accel_core import (
    Accelerator,
    AccelError,
    ConfigError,
    DataLoaderConfiguration,
    LocalSGD,
    ParallelismConfig,
)
from accel_fsdp import FullyShardedDataParallelPlugin
from accel_fsdp.checks import STRATEGIES, refused_sizes
from accel_fsdp.sharding.fsdp2 import Sharded
from accel_fsdp.sharding.wrapping import groups
from accel_fsdp.tensor.config import TorchTensorParallelPlugin
from accel_fsdp.tensor.extension import TensorParallel

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fsdp_version": 3}, "expected one of 1, 2, got 3"),
    ({"sharding_strategy": "FULL_SHART"}, "did you mean FULL_SHARD?"),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "say different things"),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "HYBRID_SHARD"}, "say different things"),
    ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD is for fsdp_version 1"),
    ({"backward_prefetch": "NO_PREFETCH"}, "backward_prefetch: NO_PREFETCH is for fsdp_version 1"),
    ({"backward_prefetch": "BACKWARDS"}, "expected one of 'BACKWARD_PRE'"),
    ({"limit_all_gathers": False}, "limit_all_gathers: false is for fsdp_version 1"),
    ({"use_orig_params": False}, "use_orig_params: false is for fsdp_version 1"),
    ({"fsdp_version": 1, "use_orig_params": False}, "flat parameters without names"),
    ({"fsdp_version": 1, "reshard_after_forward": 2}, "is for fsdp_version 2"),
    ({"fsdp_version": 1, "state_dict_type": "LOCAL_STATE_DICT"}, "take SHARDED_STATE_DICT"),
    ({"state_dict_type": "HALF_STATE_DICT"}, "expected one of 'FULL_STATE_DICT'"),
    ({"state_dict_config": object()}, "state_dict_config is for fsdp_version 1"),
    ({"auto_wrap_policy": "transformer"}, "expected one of TRANSFORMER_BASED_WRAP"),
    ({"auto_wrap_policy": "size_based_wrap"}, "needs min_num_params"),
    ({"auto_wrap_policy": "no_wrap", "transformer_cls_names_to_wrap": ["Block"]}, "TRANSFORMER_BASED_WRAP"),
    ({"auto_wrap_policy": "no_wrap", "min_num_params": 3}, "goes with SIZE_BASED_WRAP"),
    ({"min_num_params": 3, "transformer_cls_names_to_wrap": ["Block"]}, "two ways to wrap"),
    ({"mixed_precision_policy": "fp8"}, "expected one of fp32, bf16, fp16"),
    ({"mixed_precision_policy": {"buffer_dtype": "bf16"}}, "has param_dtype, reduce_dtype, output_dtype"),
    ({"mixed_precision_policy": MixedPrecision()}, "output_dtype, cast_forward_inputs, not buffer_dtype"),
    ({"mixed_precision_policy": {"param_dtype": "bf17"}}, "param_dtype is one of"),
    ({"activation_checkpointing_offload": True}, "needs activation_checkpointing"),
    ({"cpu_offload": "true"}, "cpu_offload: expected bool, got 'true'"),
    ({"activation_checkpointing": "False"}, "activation_checkpointing: expected bool, got 'False'"),
    ({"sync_module_states": 1}, "sync_module_states: expected bool \\| None, got 1"),
    ({"sharding_strategy": 9}, "sharding_strategy: expected str \\| None, got 9"),
    ({"min_num_params": "1e8"}, "min_num_params: expected int \\| None, got '1e8'"),
    ({"reshard_after_forward": -3}, "a number of ranks, got -3"),
    ({"mixed_precision_policy": torch.bfloat16}, "a mapping, or torch's policy, got torch.bfloat16"),
    ({"fsdp_version": 1, "mixed_precision_policy": MixedPrecisionPolicy()}, "not output_dtype"),
    ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "needs sync_module_states"),
    ({"fsdp_version": 1, "find_unused_parameters": True}, "is for fsdp_version 2"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        FullyShardedDataParallelPlugin(**options)


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"fsdp_version": 1}, {"ep": 2}, "parallelism.ep is for fsdp_version 2"),
        ({"fsdp_version": 1}, {"pp": 2}, "parallelism.pp is for fsdp_version 2"),
        ({"pp_schedule": "GPipe"}, {}, "fsdp.pp_schedule goes with parallelism.pp, which is 1"),
        ({"pp_split_points": ["blocks.1"]}, {"pp": 1}, "fsdp.pp_split_points goes with parallelism.pp"),
        ({"ep_modules": ["nope"]}, {}, "fsdp.ep_modules goes with parallelism.ep, which is 1"),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"dp_replicate": 1}, "asks for copies of the model, and"),
    ],
)
def test_sizes_that_do_not_go_with_the_options_are_refused_by_name(
    options: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    assert message in " ".join(refused_sizes(FullyShardedDataParallelPlugin(**options), sizes))


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(STRATEGIES), st.sampled_from(["as it is", "lower", "number", "enum"]))
def test_a_strategy_may_be_spelt_as_people_spell_it(name: str, way: str) -> None:
    member = getattr(ShardingStrategy, name, None) or ShardingStrategy[f"_{name}"]
    spelt = {"as it is": name, "lower": name.lower(), "number": member.value, "enum": member}[way]
    assert FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy=spelt).strategy == name


@pytest.mark.parametrize("member", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
def test_numbers_are_those_of_torchs_enums(member: StateDictType) -> None:
    config = FullyShardedDataParallelPlugin(fsdp_version=1, state_dict_type=member.value)
    assert config.state_dict_type == member.name


def test_objects_of_torch_are_taken_for_what_they_say() -> None:
    for offload in (CPUOffload(offload_params=True), CPUOffloadPolicy(), True):
        assert FullyShardedDataParallelPlugin(cpu_offload=offload).cpu_offload is True
    assert FullyShardedDataParallelPlugin(cpu_offload=CPUOffload()).cpu_offload is False
    found = FullyShardedDataParallelPlugin(fsdp_version=1, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    assert found.backward_prefetch == "BACKWARD_POST"


@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({}, None),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"reshard_after_forward": True}, True),
        ({"reshard_after_forward": False}, False),
        ({"reshard_after_forward": 4}, 4),
        ({"reshard_after_forward": "HYBRID_SHARD_ZERO2"}, False),
    ],
)
def test_both_ways_to_say_a_strategy_mean_one_thing(options: dict[str, Any], again: object) -> None:
    assert FullyShardedDataParallelPlugin(**options).reshards is again or again == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transformer_cls_names_to_wrap": ["Atending"]}, "did you mean Attending?"),
        ({"auto_wrap_policy": "transformer_based_wrap"}, "matches nothing in this model"),
        ({"ignored_modules": "tokns"}, "did you mean tokens?"),
    ],
)
def test_a_name_that_matches_nothing_is_an_error_with_the_near_ones(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        groups(GPT(), FullyShardedDataParallelPlugin(**options))


def test_a_model_may_name_its_own_blocks() -> None:
    model = GPT()
    model._no_split_modules = ["Attending", "OfAnotherSize"]
    names = [group.name for group in groups(model, FullyShardedDataParallelPlugin())]
    assert names == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_each_parameter_is_in_one_group() -> None:
    model = GPT()
    found = groups(model, plugin("gpt", 2))
    counted = [p for group in found for p in group.own_parameters]
    assert len(counted) == len(set(counted)) == len(list(model.parameters()))


def test_tied_weights_that_would_be_parted_are_refused_by_their_names() -> None:
    config = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Embedding"])
    with pytest.raises(ConfigError, match="tokens.weight and head.weight are one weight"):
        groups(GPT(), config)


def prepared(options: dict[str, Any], ignore: bool = False, **optimizer: Any) -> str:
    run = accelerator(plugin("mlp", **options))
    model = net("mlp")
    if ignore:
        model[4].requires_grad_(False)
    try:
        run.prepare(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **optimizer))
    except ConfigError as error:
        return str(error)
    finally:
        run.end_training()
    return "prepared"


def test_an_ignored_module_that_trains_is_refused(run_processes) -> None:
    (said,) = run_processes(prepared, {"version": 2, "ignored_modules": "4"}, world=1)
    assert "4.weight is in one of fsdp.ignored_modules" in said
    assert run_processes(prepared, {"version": 2, "ignored_modules": "4"}, True, world=1) == ["prepared"]


def ignoring(version: int) -> tuple[int, bool]:
    model = net("mlp")
    model[4].requires_grad_(False)
    run = accelerator(plugin("mlp", version, ignored_modules=[model[4]]))
    whole = model[4].weight
    prepared = run.unwrap_model(run.prepare(model))
    found = (len(prepared[4].weight), prepared[4].weight is whole)
    run.end_training()
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_modules_that_are_ignored_by_themselves_stay_whole(version: int, run_processes) -> None:
    assert run_processes(ignoring, version) == [(3, True)] * 2


def given_to_torch() -> dict[str, Any]:
    run = accelerator(plugin("mlp", 1, cpu_offload=True, limit_all_gathers=False, forward_prefetch=True))
    strategy = run.run.plugins["fsdp"]
    strategy.find_ranks(run.run.make_unit("unit", None))
    found = strategy._arguments(net("mlp"))
    run.end_training()
    return {key: found[key] for key in ("cpu_offload", "limit_all_gathers", "forward_prefetch")}


def test_version_1_is_told_to_offload_where_that_is_possible(run_processes) -> None:
    (found,) = run_processes(given_to_torch, world=1)
    assert found == {
        "cpu_offload": CPUOffload(offload_params=True),
        "limit_all_gathers": False,
        "forward_prefetch": True,
    }


def device_only() -> str:
    run = accelerator(plugin("mlp", 2, cpu_offload=True))
    model = net("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ConfigError) as caught:
        run.prepare(model, optimizer)
    run.end_training()
    return str(caught.value)


@pytest.mark.parametrize(("carried", "names"), [("cuda:gloo,cpu:gloo", 2), ("cuda:nccl,cpu:gloo", 0)])
def test_a_device_whose_tensors_gloo_would_gather_is_refused(
    monkeypatch: pytest.MonkeyPatch, carried: str, names: int
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: carried)
    run: Any = SimpleNamespace(device=torch.device("cuda"), world=SimpleNamespace(size=2))
    run.config = SimpleNamespace(parallelism={"tp": 2})
    config = plugin("mlp", 2)
    mesh = SimpleNamespace(size=lambda *names: 2, names=lambda *splits: ["dp_shard"])
    unit: Any = SimpleNamespace(models=[], mesh=mesh, plugin=SimpleNamespace(config=config))
    parallel = TensorParallel(TorchTensorParallelPlugin(), run)
    found = [*Sharded(config, run).refuse_unit(unit, [], []), *parallel.refuse_unit(unit, [], [])]
    assert [text.partition(" ")[0] for text in found] == ["'fsdp'", "'tensor-parallel'"][:names]


def test_an_optimizer_of_the_device_is_refused_with_cpu_offload(run_processes) -> None:
    assert "SGD(capturable=True) steps on the device" in run_processes(device_only, world=1)[0]


def test_version_1_cannot_offload_a_run_on_the_cpu(run_processes) -> None:
    (said,) = run_processes(prepared, {"version": 1, "cpu_offload": True}, world=1)
    assert said.splitlines()[-1] == "leave it out, or set fsdp.fsdp_version: 2"


def test_version_1_does_not_offload_from_the_cpu_to_the_cpu(run_processes) -> None:
    options = {"version": 1, "state_dict_config": FullStateDictConfig(offload_to_cpu=True)}
    (said,) = run_processes(prepared, options, world=1)
    assert said.splitlines()[-1] == "make it with offload_to_cpu=False"


def apart_and_uneven(version: int) -> list[str]:
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    said = []
    with pytest.raises(ConfigError) as caught, LocalSGD(run, model, 1) as local:
        local.step()
    said.append(str(caught.value))
    with pytest.raises(ConfigError) as caught, run.join_uneven_inputs([model]):
        pass
    said.append(str(caught.value))
    run.end_training()
    return said


@pytest.mark.parametrize("version", [1, 2])
def test_what_needs_whole_weights_on_a_rank_is_refused_and_does_not_hang(version: int, run_processes) -> None:
    for local, uneven in run_processes(apart_and_uneven, version):
        assert "ranks cannot step by themselves" in local
        assert "cannot train where ranks run out of batches at" in uneven


def left_over(version: int, trains: bool) -> tuple[int, str]:
    run = accelerator(plugin("mlp", version), DataLoaderConfiguration(even_batches=False))
    data = DataLoader(TensorDataset(torch.randn(5, 6)), 1)
    model = net("mlp")
    model, _, data = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    seen, said = 0, "nothing"
    try:
        for (x,) in data:
            with torch.set_grad_enabled(trains):
                loss = model(x).sum()
            if trains:
                run.backward(loss)
            seen += 1
    except AccelError as error:
        said = str(error)
    run.end_training()
    return seen, said


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.by_default("2-True")
def test_a_batch_that_not_all_ranks_have_is_refused_and_does_not_hang(
    version: int, trains: bool, run_processes
) -> None:
    (first, said), other = run_processes(left_over, version, trains)
    assert (first, other) == (2, (2, "nothing"))
    assert "not all of 2 readers have this batch" in said


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "pp", "ep"])
def test_a_size_in_section_fsdp_is_an_error_that_names_section_parallelism(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accel.yaml").write_text(f"strategy: fsdp\nfsdp: {{{name}_size: 2}}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=f"fsdp.{name}_size: unknown key; did you mean parallelism.{name}"):
        Accelerator(cpu=True)


def test_the_options_of_the_readme_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_processes
) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section, *_ = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    example, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "accel.yaml").write_text(f"device: cpu\n{section}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    assert run_processes(read, example, world=1) == [(("Block",), True, False)]


def read(example: str) -> tuple[Any, ...]:
    run = Accelerator()
    found = run.run.plugins["fsdp"].config
    run.end_training()
    names: dict[str, Any] = {}
    exec(example, names)
    given = names["accelerator"].run.plugins["fsdp"].config
    names["accelerator"].end_training()
    return (
        tuple(found.transformer_cls_names_to_wrap),
        found.activation_checkpointing,
        given.reshard_after_forward,
    )


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def said_of(version: int, options: dict[str, Any]) -> list[str]:
    heard = Heard()
    logging.getLogger("accel_fsdp").addHandler(heard)
    run = accelerator(plugin("mlp", version, auto_wrap_policy="no_wrap", **options))
    run.prepare(net("mlp"))
    run.end_training()
    return heard.said


def fill(module: torch.nn.Module) -> None:
    raise AssertionError


@pytest.mark.parametrize("version", [1, 2])
def test_options_that_do_nothing_for_a_model_are_told(version: int, run_processes) -> None:
    options = {"param_init_fn": fill, "cpu_ram_efficient_loading": True, "forward_prefetch": True}
    first, second = run_processes(said_of, version, options)
    outside = "this MLP was not built in accelerator.model_init_context()"
    assert first[0] == f"fsdp.param_init_fn does nothing: {outside}"
    assert first[1].startswith("fsdp.forward_prefetch does nothing: it is sharded with 0 block(s)")
    assert second == [f"fsdp.cpu_ram_efficient_loading does nothing: {outside}"]


def real_sizes() -> tuple[int, int, int]:
    run = accelerator(FullyShardedDataParallelPlugin(), ParallelismConfig(ep=2, dp_shard=-1))
    sizes = run.parallelism_config
    run.end_training()
    return sizes.dp_shard_size, sizes.ep_size, sizes.tp_size


def test_an_accelerator_tells_the_sizes_on_the_ranks_that_there_are(run_processes) -> None:
    assert run_processes(real_sizes, world=2) == [(2, 2, 1)] * 2
