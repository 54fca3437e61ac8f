"""Plugins that other packages bring, trackers of one's own, and configs of what is not served."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    BnbQuantizationConfig,
    DeepSpeedPlugin,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    load_and_quantize_model,
)
from peers import said

from accel_compat.launch.convert import convert
from accel_compat.unsupported import NotServedError
from accel_core import PluginError


def test_megatrons_fields_come_from_its_variables(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "true")
    plugin = MegatronLMPlugin(pp_degree=2, consumed_samples=[5])

    assert (plugin.tp_degree, plugin.pp_degree, plugin.num_micro_batches) == (4, 2, 1)
    assert (plugin.sequence_parallelism, plugin.recompute_activations) == (True, False)
    assert plugin.consumed_samples == [5, 0, 0]


def test_megatron_is_told_what_was_given_only():
    plugin = MegatronLMPlugin(tp_degree=2, context_parallel_size=2, lr_decay_style="cosine")

    told = plugin.translation()
    assert told.pop("gradient_clipping") == 1.0, "Accelerate clips unasked"
    assert told.pop("average_losses"), "Megatron-LM's loss is that of all data"
    assert told == {"tp_degree": 2, "context_parallel_size": 2, "lr_decay_style": "cosine"}


def test_what_only_megatron_core_knows_is_handed_on_to_it():
    plugin = MegatronLMPlugin(recompute_granularity="selective", other_megatron_args={"rotary_base": 5})

    handed = plugin.translation()["other_megatron_args"]
    assert handed == {"recompute_granularity": "selective", "rotary_base": 5}


def test_what_is_off_anyway_is_not_handed_on():
    plugin = MegatronLMPlugin(no_load_optim=False, use_custom_fsdp=False, attention_softmax_in_fp32=False)

    assert plugin.translation()["other_megatron_args"] == {"attention_softmax_in_fp32": False}


def test_megatrons_part_of_a_config_file_is_its_section():
    settings = {"use_megatron_lm": True, "megatron_lm_tp_degree": 2, "megatron_lm_no_load_optim": "false"}
    settings |= {"megatron_lm_attention_dropout": 0.1}

    found = convert(settings).config

    assert found["strategy"] == "megatron"
    assert found["megatron"] == {"other_megatron_args": {"attention_dropout": 0.1}}
    assert found["parallelism"] == {"tp": 2}


@pytest.mark.needs("accel-megatron")
def test_accel_megatron_takes_the_plugin():
    ours = MegatronLMPlugin(tp_degree=2, pp_degree=2, num_micro_batches=4, lr_decay_style="cosine").to_ours()

    assert (ours.tp_degree, ours.pp_degree, ours.num_micro_batches) == (2, 2, 4)
    with pytest.raises(ValueError, match="tensorboard_dir: megatron-core writes no logs"):
        MegatronLMPlugin(tensorboard_dir="logs").to_ours()


@pytest.mark.skipif(find_spec("accel_megatron") is not None, reason="accel-megatron is installed")
def test_without_its_package_megatron_is_refused_with_the_command_that_installs_it():
    with pytest.raises(PluginError, match="pip install ./backends/megatron"):
        Accelerator(megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))


def test_a_quantization_config_is_checked_and_filled():
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")

    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (torch.bfloat16, torch.bfloat16)
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype is torch.float16
    for wrong in ({}, {"load_in_8bit": True, "load_in_4bit": True}, {"load_in_8bit": 1}):
        with pytest.raises(ValueError, match="load_in"):
            BnbQuantizationConfig(**wrong)


def test_a_tracker_can_be_registered_and_named(tmp_path):
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

    class Rows(GeneralTracker):
        name, requires_logging_directory = "rows", True

        def __init__(self, run_name: str, logging_dir: str, **options: object) -> None:
            super().__init__()
            self.rows = [(run_name, logging_dir, options)]

        @property
        def tracker(self):
            return self.rows

        def store_init_configuration(self, values):
            self.rows.append(dict(values))

        def log(self, values, step=None, **kwargs):
            self.rows.append((step, values))

    register_tracker_class(Rows)
    try:
        with pytest.raises(ValueError, match="requires a `logging_dir`"):
            Accelerator(log_with="rows")
        accelerator = Accelerator(log_with="rows", project_dir=str(tmp_path))
    finally:
        del LOGGER_TYPE_TO_CLASS["rows"]
    accelerator.init_trackers("project", init_kwargs={"rows": {"fast": True}})
    accelerator.log({"loss": 1.0}, step=3)

    assert isinstance(accelerator.get_tracker("rows"), Rows)
    assert accelerator.get_tracker("rows", unwrap=True) == [
        ("project", str(tmp_path), {"fast": True}),
        (3, {"loss": 1.0}),
    ]


def test_a_tracker_without_what_it_needs_cannot_be_made():
    from accelerate.tracking import GeneralTracker

    with pytest.raises(NotImplementedError, match="`name`, `requires_logging_directory`, `tracker`"):
        GeneralTracker()


def test_transformers_can_be_told_the_deepspeed_config(monkeypatch):
    theirs = MagicMock()
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", theirs)
    plugin = DeepSpeedPlugin(zero_stage=3)
    plugin.set_deepspeed_weakref()

    (told,) = theirs.set_hf_deepspeed_config.call_args.args
    assert told is plugin.dschf, "they hold it weakly"
    assert told.is_zero3()
    assert told.config["train_micro_batch_size_per_gpu"] == told.config["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in told.config


def test_a_precision_policy_needs_all_its_keys():
    bf16 = torch.bfloat16
    for given in ({"param_dtype": bf16}, {"param_dtype": bf16, "reduce_dtype": bf16, "output_dtype": "bf16"}):
        with pytest.raises(ValueError, match="output_dtype"):
            FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=given)
    whole = dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), bf16)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=whole)
    assert plugin.mixed_precision_policy.param_dtype is bf16


def test_offloading_is_torchs_object_of_the_version():
    made = [FullyShardedDataParallelPlugin(fsdp_version=version) for version in (1, 2)]

    assert [type(each.cpu_offload).__name__ for each in made] == ["CPUOffload", "OffloadPolicy"]
    for version in (1, 2):
        with pytest.raises(ValueError, match="cpu_offload must be"):
            FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload="all")


ONE_GROUP = """
import json, logging
from torch import nn
from torch.distributed.fsdp import FSDPModule
from accelerate import Accelerator, FullyShardedDataParallelPlugin

heard = []
logger = logging.getLogger("accel_fsdp.sharding.base")
logger.addFilter(lambda record: heard.append(record.getMessage()) or True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, WRITTEN)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = accelerator.prepare(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))))
sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
print(json.dumps([sharded, heard]), flush=True)
"""


@pytest.mark.needs("accel-fsdp")
def test_fsdp_without_a_policy_stays_one_group_as_in_accelerate_and_warns(run_processes):
    sharded, (warning,) = said(run_processes, ONE_GROUP.replace("WRITTEN", ""), ours=True)
    assert sharded == 1
    assert "[Sequential]; fsdp.auto_wrap_policy: NO_WRAP keeps one group" in warning


@pytest.mark.needs("accel-fsdp")
def test_fsdp_with_no_wrap_that_somebody_wrote_is_one_group_without_a_warning(run_processes):
    written = 'auto_wrap_policy="no_wrap"'
    assert said(run_processes, ONE_GROUP.replace("WRITTEN", written), ours=True) == [1, []]


def test_quantizing_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "accel_bitsandbytes", None)
    with pytest.raises(PluginError, match="needs accel-bitsandbytes, which is not installed"):
        load_and_quantize_model(torch.nn.Linear(1, 1), BnbQuantizationConfig(load_in_8bit=True))


@pytest.mark.parametrize("recipe", [MSAMPRecipeKwargs(), FP8RecipeKwargs(backend="msamp")])
def test_ms_amp_is_refused_with_the_reason(recipe):
    with pytest.raises(
        NotServedError, match=r"MS-AMP is no longer maintained, and no release(.|\n)*AORecipeKwargs"
    ):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])
