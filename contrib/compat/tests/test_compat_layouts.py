"""Several DeepSpeed plugins, and the meshes that a ParallelismConfig describes, in two and four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import said

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]
needs = {
    name: pytest.mark.needs(name.replace("_", "-"))
    for name in ("accel_fsdp", "accel_context_parallel", "deepspeed", "transformers")
}

LLAMA = """
import json, torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

mesh = ParallelismConfig(**SIZES)
sharded = mesh.dp_shard_enabled or mesh.cp_enabled
fsdp = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
accelerator = Accelerator(cpu=True, parallelism_config=mesh, fsdp_plugin=fsdp)
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
SPLIT
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(ids, batch_size=8 // mesh.data_parallel_size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(2):
    for batch in loader:
        labels = batch.roll(-1, 1)  # ranks that share a sequence have equally many tokens
        places = torch.arange(16)[None].expand(batch.shape).contiguous()
        buffers = [batch, labels, places]
        with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
            loss = model(input_ids=batch, position_ids=places, shift_labels=labels, labels=labels).loss
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if mesh.dp_cp_dim_names:  # the ranks with other samples or tokens
            group = accelerator.torch_device_mesh["dp_cp"].get_group()
            torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.SUM, group)
            mean /= group.size()
        losses.append(mean.item())
if accelerator.is_main_process:
    dims = accelerator.torch_device_mesh
    print(json.dumps([losses, accelerator.distributed_type.value, dims and list(dims.mesh_dim_names)]))
"""


BY_TRANSFORMERS = """
import os
folder = os.environ["PYTEST_TMP"]
if accelerator.is_main_process:
    model.save_pretrained(folder)
accelerator.wait_for_everyone()
model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", tp_size=2)
"""
BY_TORCH = """
from torch.distributed.tensor import parallel
plan = {name: parallel.ColwiseParallel() for name in ("gate_proj", "up_proj")}
plan["down_proj"] = parallel.RowwiseParallel()
for layer in model.model.layers:
    parallel.parallelize_module(layer.mlp, accelerator.torch_device_mesh["tp"], plan)
"""


def llama(run_processes, processes: int, split: str = "", **sizes: int) -> list:
    code = LLAMA.replace("SIZES", repr(sizes)).replace("SPLIT", split)
    return said(run_processes, code, ours=True, processes=processes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, run_processes):
    return llama(run_processes, 1)[0]


@needs["accel_fsdp"]
@needs["transformers"]
@pytest.mark.parametrize(
    ("processes", "sizes", "kind"),
    [
        (2, {"dp_replicate_size": 2}, "MULTI_CPU"),
        (2, {"dp_shard_size": 2}, "FSDP"),
        (2, {"tp_size": 2}, "FSDP"),
        (4, {"dp_shard_size": 2, "tp_size": 2}, "FSDP"),
        (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, "FSDP"),
        pytest.param(4, {"dp_shard_size": 2, "cp_size": 2}, "FSDP", marks=needs["accel_context_parallel"]),
    ],
    ids=str,
)
def test_a_mesh_trains_with_the_losses_of_one_process(
    tmp_path: Path, monkeypatch, alone, processes, sizes, kind, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    losses, found, dims = llama(run_processes, processes, **sizes)

    assert found == kind
    assert losses == pytest.approx(alone, rel=1e-4)
    assert {name.removesuffix("_size") for name in sizes} <= set(dims)


@needs["accel_fsdp"]
@needs["transformers"]
@pytest.mark.parametrize(
    ("processes", "split", "sizes"),
    [(2, BY_TRANSFORMERS, {}), (2, BY_TORCH, {}), (4, BY_TORCH, {"dp_shard_size": 2})],
    ids=["transformers", "torch", "torch, sharded"],
)
def test_a_model_that_the_program_splits_itself_trains_with_the_losses_of_one_process(
    tmp_path: Path, monkeypatch, alone, processes, split, sizes, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    losses, *_ = llama(run_processes, processes, split=split, tp_size=2, **sizes)

    assert losses == pytest.approx(alone, rel=1e-4)


TWO = """
import json, torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState

def plugin(stage):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    config |= {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    return DeepSpeedPlugin(hf_ds_config=config)

plugins = {"student": plugin(2), "teacher": plugin(3)}
accelerator = Accelerator(deepspeed_plugin=plugins, cpu=True)
state = AcceleratorState()
assert state.deepspeed_plugin is accelerator.deepspeed_plugin is plugins["student"]
torch.manual_seed(0)
models, optimizers = [], []
for name in plugins:
    state.select_deepspeed_plugin(name)
    assert accelerator.deepspeed_plugin is plugins[name]
    made = torch.nn.Linear(4, 2)
    made, optimizer = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    models.append(made)
    optimizers.append(optimizer)
losses = []
for _ in range(3):
    for model, optimizer in zip(models, optimizers):
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
if accelerator.is_main_process:
    print(json.dumps([[model.zero_optimization_stage() for model in models], losses[:2], losses[-2:]]))
"""


@needs["deepspeed"]
def test_two_models_train_each_by_the_deepspeed_plugin_that_was_selected(
    tmp_path: Path, monkeypatch, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    stages, first, last = said(run_processes, TWO, ours=True, processes=2)

    assert stages == [2, 3]
    assert all(end < start for start, end in zip(first, last, strict=True))


AGAIN = """
import json, torch
from accelerate import Accelerator, DeepSpeedPlugin

config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
config |= {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.weight.tolist()
first = accelerator.prepare(model, optimizer)
engine, stepper = accelerator.prepare(model, optimizer)
accelerator.backward(engine(torch.ones(2, 4)).square().mean())
stepper.step()
if accelerator.is_main_process:
    print(json.dumps([engine is first[0], stepper is first[1], engine.module.weight.tolist() != before]))
"""


@needs["deepspeed"]
def test_what_an_engine_trains_is_the_same_when_it_is_prepared_again(
    tmp_path: Path, monkeypatch, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    assert said(run_processes, AGAIN, ours=True, processes=2) == [True, True, True]


FILLED = """
import json, torch
from accelerate import Accelerator, DeepSpeedPlugin

zero = {"stage": STAGE, "stage3_gather_16bit_weights_on_model_save": "auto"}
config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero}
config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=CLIP)
accelerator = Accelerator(deepspeed_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
assert accelerator.deepspeed_engine_wrapped is None
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
before = [p.clone() for p in accelerator.get_state_dict(model).values()]
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(1e3 * model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        break
after = list(accelerator.get_state_dict(model).values())
moved = torch.cat([(a - b).flatten() for a, b in zip(after, before)]).norm().item()
held = accelerator.deepspeed_engine_wrapped
assert held.engine is model
if STAGE:  # stage 0 in float32 knows none
    assert isinstance(held.get_global_grad_norm(), float)
if accelerator.is_main_process:
    print(json.dumps([accelerator.state.deepspeed_plugin.deepspeed_config, moved]))
"""


@needs["deepspeed"]
@pytest.mark.parametrize(
    ("stage", "processes", "clip"), [(0, 2, 0.5), (2, 2, "auto"), (3, 2, 0.5), (3, 1, "auto")]
)
def test_after_prepare_deepspeeds_config_says_what_the_engine_does(
    tmp_path: Path, monkeypatch, stage, processes, clip, run_processes
):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    code = FILLED.replace("STAGE", str(stage)).replace("CLIP", repr(clip), 1)
    config, moved = said(run_processes, code, ours=True, processes=processes)
    norm = 1.0 if clip == "auto" else clip  # as in Accelerate

    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["train_batch_size"] == 8 * processes
    assert config["gradient_clipping"] == norm
    assert config["bf16"] == config["fp16"] == {"enabled": False}
    assert "auto" not in str(config)
    assert moved == pytest.approx(norm, rel=1e-4), "the gradients are clipped once, by what the config says"


SHARDED = """
import json, os, torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, load_fsdp_model, load_fsdp_optimizer
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-1))


def step():
    accelerator.backward(model(torch.ones(4, 3)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return [p.full_tensor().sum().item() for p in model.parameters()]


step()
folder, more = os.environ["PYTEST_TMP"], {"use_dcp": DCP}
save_fsdp_model(plugin, accelerator, model, folder, **more)
save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, **more)
wanted = [step(), step()]
load_fsdp_model(plugin, accelerator, model, folder, **more)
load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, **more)
found = [step(), step()]
files = sorted(os.listdir(folder))
if accelerator.is_main_process:
    print(json.dumps([wanted, found, files]))
"""


@needs["accel_fsdp"]
@pytest.mark.parametrize("dcp", [True, False])
def test_what_fsdp_shards_is_saved_and_loaded_in_shards(tmp_path: Path, monkeypatch, dcp, run_processes):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    wanted, found, files = said(run_processes, SHARDED.replace("DCP", str(dcp)), ours=True, processes=2)

    assert found == wanted
    shards = ["optimizer_0", "pytorch_model_fsdp_0"]
    apart = [f"{name}_rank{rank}.bin" for name in shards for rank in (0, 1)]
    assert [file for file in files if file != "peer.py"] == (shards if dcp else apart)
