"""Each bad config gives one readable error, and no engine is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_core import Accelerator, ConfigError
from accel_deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler

pytestmark = pytest.mark.timeout(300)

ADAM = {"type": "Adam", "params": {"lr": 0.001}}

# -- without a run -------------------------------------------------------------------------------

CONTRADICTORY: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"zero_stage": 3, "hf_ds_config": {"zero_optimization": {"stage": 2}}},
        ["zero_stage is 3", "zero_optimization.stage in hf_ds_config is 2"],
    ),
    (
        {"gradient_clipping": 1.0, "hf_ds_config": {"gradient_clipping": 0.5}},
        ["gradient_clipping is 1.0", "is 0.5"],
    ),
    ({"zero_stage": 2, "offload_param_device": "cpu"}, ["offload_param_device needs ZeRO stage 3", "is 2"]),
    ({"zero_stage": 1, "zero3_init_flag": True}, ["zero3_init_flag needs ZeRO stage 3"]),
    ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, ["offload_optimizer_device needs ZeRO stage 1"]),
    (
        {"zero_stage": 3, "offload_optimizer_device": "nvme"},
        ["offload_optimizer_nvme_path None", "give both"],
    ),
    ({"zero_stage": 3, "offload_param_nvme_path": "/x"}, ["offload_param_device is None", "give both"]),
    (
        {"zero_stage": 1, "hf_ds_config": {"zero_optimization": {"overlap_comm": True}}},
        ["overlap_comm needs ZeRO stage 2 or 3", "zero_stage is 1"],
    ),
    ({"enable_msamp": True}, ["MS-AMP", "leave it out"]),
    ({"hf_ds_config": {"zero_optimization": {"stage": 4}}}, ["zero_optimization.stage is 4"]),
    ({"zero_stage": 5}, ["zero_stage", "5"]),
    ({"zero_stage": "two"}, ["zero_stage"]),
    ({"offload_optimizer_device": "gpu"}, ["offload_optimizer_device", "gpu"]),
    ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps"]),
    ({"gradient_clipping": -1.0}, ["gradient_clipping"]),
    ({"hf_ds_config": "/nowhere/ds.json"}, ["there is no file /nowhere/ds.json"]),
    ({"hf_ds_config": 3}, ["hf_ds_config is a int", "a mapping, or the path"]),
]


@pytest.mark.parametrize(("options", "words"), CONTRADICTORY)
def test_contradictions_wrong_types_and_missing_files_are_refused_at_once(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        DeepSpeedPlugin(**options)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[1]", "holds a list"), ('{"a": 1, "a": 2}', "a stands there twice")],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path: Any, text: str, words: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)

    with pytest.raises((ValueError, TypeError)) as refused:
        DeepSpeedPlugin(hf_ds_config=str(file))
    assert words in str(refused.value)
    assert str(file) in str(refused.value)


def test_all_contradictions_are_listed_at_once() -> None:
    with pytest.raises(ValueError, match="offload_param_device") as refused:
        DeepSpeedPlugin(zero_stage=1, offload_param_device="cpu", zero3_init_flag=True)
    assert "zero3_init_flag" in str(refused.value)


# -- against the run -----------------------------------------------------------------------------

UNFIT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an unknown key": ({"zero_optimisation": {"stage": 2}}, ["zero_optimisation", "zero_optimization"]),
    "an unknown key in a section": (
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        ["overlap_com", "not permitted"],
    ),
    "a wrong type": (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}},
        ["reduce_bucket_size"],
    ),
    "an unknown device": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
        ["offload_optimizer", "gpu"],
    ),
    "a micro-batch size": (
        {"train_micro_batch_size_per_gpu": 8},
        ["train_micro_batch_size_per_gpu is 8", "but 4 by the prepared loaders' batch size"],
    ),
    "a batch size": ({"train_batch_size": 64}, ["train_batch_size is 64", "but 4 by 4 a reader"]),
    "two mismatches": (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
        ["train_batch_size is 64", "train_micro_batch_size_per_gpu is 8"],
    ),
    "quantized weights, which CPUs have not": (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        ["zero_quantized_weights: True needs Quantizer", "cannot build here (cpu)"],
    ),
    "quantized gradients, which CPUs have not": (
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        ["zero_quantized_gradients: True needs Quantizer"],
    ),
    "NVMe without libaio": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/fast"}}},
        ["offload_param.device: nvme needs AsyncIO"],
    ),
    "what DeepSpeed has given up": (
        {"zero_optimization": {"stage": 3, "mics_shard_size": 1}},
        ["mics_shard_size", "no longer supported"],
    ),
    "fp16 in stage 0": (
        {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}},
        ["in ZeRO stage 0 DeepSpeed does not scale fp16's loss"],
    ),
    "fp16 on a CPU without it": (
        {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
        ["float16", "set mixed_precision: bf16"],
    ),
    "an optimizer twice": ({"optimizer": ADAM}, ["optimizer is in the JSON, and a AdamW is prepared"]),
}
DUMMIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a DummyOptim for nothing": ({}, ["a DummyOptim stands for the JSON's optimizer, but there is none"]),
    "a DummyScheduler for nothing": (
        {"optimizer": ADAM},
        ["a DummyScheduler stands for the JSON's scheduler, but there is none"],
    ),
    "an auto that nothing fills": (
        {
            "optimizer": ADAM,
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        },
        ["nothing says what to fill in for scheduler.params.total_num_steps"],
    ),
}


def refused(cases: dict[str, tuple[dict[str, Any], list[str]]], dummies: bool) -> dict[str, str]:
    """What is said to each, by one run each; and whether an engine was built."""
    import deepspeed

    from accel_core.contract.run import live

    deepspeed.ops.op_builder.cpu.AsyncIOBuilder.is_compatible = lambda *_, **__: False
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda _: False

    def built(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started")

    deepspeed.initialize = built
    found = {}
    for name, (given, _) in cases.items():
        try:
            accelerator = Accelerator(cpu=True, plugins=[DeepSpeedPlugin(hf_ds_config=given)])
            model = torch.nn.Linear(2, 2)
            loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
            optimizer: Any = (
                DummyOptim(model.parameters()) if dummies else torch.optim.AdamW(model.parameters())
            )
            rate = [DummyScheduler(optimizer)] if dummies else []
            accelerator.prepare(model, optimizer, loader, *rate)
            accelerator.end_training()
        except ConfigError as error:
            found[name] = str(error)
        for run in live():
            run.end()
    return found


@pytest.mark.parametrize(("cases", "dummies"), [(UNFIT, False), (DUMMIES, True)], ids=["real", "dummies"])
def test_what_does_not_fit_the_run_is_refused_by_key_values_and_origins(
    cases: Any, dummies: bool, run_processes
) -> None:
    (said,) = run_processes(refused, cases, dummies, world=1, timeout=120)

    missing = {
        name: (said.get(name), words)
        for name, (_, words) in cases.items()
        if any(word not in said.get(name, "") for word in words)
    }
    assert missing == {}
