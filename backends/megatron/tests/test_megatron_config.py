"""Section `megatron`: every option that people know is there, and none is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import fields

from accel_core import RunConfig, World
from accel_megatron import MegatronLMPlugin, launching
from accel_megatron.checks import of_world
from accel_megatron.config import Sized

SEEDS = set(
    """
tp_degree pp_degree num_micro_batches gradient_clipping sequence_parallelism recompute_activations
use_distributed_optimizer pipeline_model_parallel_split_rank num_layers_per_virtual_pipeline_stage
is_train_batch_min train_iters train_samples weight_decay_incr_style start_weight_decay end_weight_decay
lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr
consumed_samples no_wd_decay_cond scale_lr_cond lr_mult megatron_dataset_flag seq_length encoder_seq_length
decoder_seq_length tensorboard_dir set_all_logging_options eval_iters eval_interval return_logits
custom_train_step_class custom_train_step_kwargs custom_model_provider_function
custom_prepare_model_function custom_megatron_datasets_provider_function custom_get_batch_function
custom_loss_function other_megatron_args
""".split()  # noqa: SIM905 - a list of forty lines says no more
)


def test_every_option_people_know_is_there() -> None:
    assert {each.name for each in fields(MegatronLMPlugin)} == {
        *SEEDS,
        "average_losses",
        "context_parallel_size",
        "expert_model_parallel_size",
    }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pipeline_model_parallel_split_rank": 1}, "no stages of its own"),
        ({"tensorboard_dir": "logs"}, "log_with"),
        ({"custom_train_step_kwargs": {"alpha": 1}}, "custom_train_step_class"),
        ({"custom_train_step_class": object, "custom_loss_function": len}, "leave custom_loss_function out"),
        ({"consumed_samples": [8, 0, 0, 0]}, "three numbers"),
        ({"seq_length": 8, "encoder_seq_length": 8}, "two names"),
        ({"train_iters": 5, "lr_decay_samples": 9}, "give all of them in one"),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, "set one"),
        ({"start_weight_decay": 0.0, "end_weight_decay": 0.1}, "weight_decay_incr_style"),
        ({"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}, "set both"),
        ({"lr_mult": 2.0}, "scale_lr_cond"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        MegatronLMPlugin(**options)
    assert any(name in str(caught.value) for name in options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sequence_parallelism": True}, "set parallelism.tp: 2 or more"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "set parallelism.pp: 2 or more"),
        ({"pp": 4, "num_micro_batches": 2}, "stages would idle"),
    ],
)
def test_options_that_need_other_sizes_are_refused(options: dict[str, Any], says: str) -> None:
    assert says in " ".join(of_world(Sized(**options), World(size=4)))


@pytest.mark.parametrize(
    ("sizes", "found"),
    [({}, (1, 1, 1)), ({"tp": 2, "pp": -1}, (2, 4, 1)), ({"dp_replicate": 4, "tp": -1}, (2, 1, 1))],
)
def test_a_size_of_minus_one_is_the_ranks_that_the_others_leave(sizes: dict[str, int], found: Any) -> None:
    sized = Sized.of(MegatronLMPlugin(), sizes, 8)
    assert (sized.tp, sized.pp, sized.ep) == found


def test_none_of_several_is_as_good_as_not_said() -> None:
    nothing = dict.fromkeys(("consumed_samples", "custom_train_step_kwargs", "other_megatron_args"))
    assert MegatronLMPlugin(**nothing) == MegatronLMPlugin()


def test_a_batch_is_cut_into_one_micro_batch_a_stage_unless_told() -> None:
    assert Sized().micro_batches == 1
    assert Sized(pp=4).micro_batches == 4
    assert Sized(pp=4, num_micro_batches=8).micro_batches == 8


def test_ranks_that_split_layers_are_given_one_queue() -> None:
    world = World()
    split = RunConfig(parallelism={"tp": 2})

    assert launching.launch_environment(split, world) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert launching.launch_environment(RunConfig(), world) == {}
