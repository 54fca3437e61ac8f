"""Calls that Accelerate answers in a way of its own: lengths, lists and wrong arguments."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchDynamoPlugin,
    pad_across_processes,
)
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.full


def test_a_loader_that_skips_is_as_long_after_an_epoch_as_before():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=4))
    shorter = accelerator.skip_first_batches(loader, 1)
    assert [len(shorter), len(list(shorter)), len(shorter)] == [3, 3, 3]


def test_a_device_placement_for_each_object_is_asked_for():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="a list with 2 elements"):
        Accelerator(cpu=True).prepare(model, optimizer, device_placement=[True])
    with pytest.raises(ValueError, match="should be a list with 2 elements"):
        Accelerator(cpu=True).prepare(model, optimizer, device_placement=[])


def test_models_to_accumulate_may_be_a_list():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    seen = []
    for _ in range(4):
        with accelerator.accumulate([model]):
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False, True]


def test_a_deepspeed_plugin_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="`deepspeed_plugin` must be a DeepSpeedPlugin"):
        Accelerator(cpu=True, deepspeed_plugin=3)


def test_torch_compile_is_asked_for_once():
    with pytest.raises(ValueError, match="both `dynamo_plugin` and `dynamo_backend`"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fsdp_plugin", "FullyShardedDataParallelPlugin"),
        ("megatron_lm_plugin", "MegatronLMPlugin"),
        ("parallelism_config", "ParallelismConfig"),
        ("torch_tp_plugin", "TorchTensorParallelPlugin"),
    ],
)
def test_a_number_is_no_strategy(name, kind):
    with pytest.raises(TypeError, match=f"`{name}` must be a {kind} object"):
        Accelerator(cpu=True, **{name: 3})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version is 3\nset it to the number 1 or 2"),
        ({"fsdp_version": "2"}, "fsdp_version is '2'"),
        ({"fsdp_version": 2, "sharding_strategy": "ALL"}, "sharding_strategy is 'ALL'; it must be one of"),
        ({"fsdp_version": 2, "backward_prefetch": "SOON"}, "backward_prefetch is 'SOON'; it must be one of"),
    ],
    ids=repr,
)
def test_fsdps_words_are_judged_in_both_versions(given, message):
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallelPlugin(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dp_replicate_size": "2"}, TypeError, "dp_replicate_size is '2', not a whole number"),
        ({"tp_size": 2.5}, TypeError, "tp_size is 2.5, not a whole number"),
        ({"dp_shard_size": -1}, ValueError, "dp_shard_size must be at least 1, but got -1"),
    ],
    ids=repr,
)
def test_sizes_of_a_mesh_are_numbers_from_one_on(given, error, message):
    with pytest.raises(error, match=message):
        ParallelismConfig(**given)


@pytest.mark.parametrize("given", [3, []], ids=repr)
def test_a_deepspeed_config_is_a_path_a_dict_or_text(given):
    with pytest.raises(ValueError, match="Expected a string path to an existing deepspeed config"):
        DeepSpeedPlugin(hf_ds_config=given)


@pytest.mark.parametrize("given", [{"a": [1, 2, 3], "b": [1]}, {"texts": ["x"], "length": 3}], ids=repr)
def test_a_process_that_is_alone_gets_all_that_was_to_be_split(given):
    for splits in (Accelerator(cpu=True), PartialState()):
        with splits.split_between_processes(given) as share:
            assert share == given


def test_only_tensors_are_padded_on_one_process_too():
    with pytest.raises(TypeError, match="<class 'int'>"):
        pad_across_processes([torch.ones(1), 3])
