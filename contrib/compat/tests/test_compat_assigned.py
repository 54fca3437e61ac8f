"""What programs assign to an Accelerator counts as it does there; saving needs the main process only."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from peers import needs_accelerate, said

from accel_compat.unsupported import NotServedError
from accel_core import CheckpointError

HELPER = """
import json, os, torch
from accelerate import Accelerator
def say():
    return Accelerator().is_main_process
a = Accelerator(cpu=True, gradient_accumulation_steps=4)
m = torch.nn.Linear(1, 1)
o = torch.optim.SGD(m.parameters(), lr=1.)
s = torch.optim.lr_scheduler.StepLR(o, 1, .5)
m, o, s = a.prepare(m, o, s)
say()
kept = Accelerator()
for i in range(8):
    with a.accumulate(m):
        a.backward(m(torch.ones(1, 1)).sum())
        o.step(); s.step(); o.zero_grad()
print(json.dumps([s.get_last_lr(), kept.mixed_precision, a.gradient_state.num_steps]))
"""
STEPS = """
import json, torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
a = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
m = torch.nn.Linear(1, 1)
m, o, loader = a.prepare(m, torch.optim.SGD(m.parameters(), lr=.1), DataLoader(torch.rand(5, 1)))
seen = []
a.step = 1
for epoch in range(2):
    for batch in loader:
        with a.accumulate(m):
            a.backward(m(batch).sum())
            o.step(); o.zero_grad()
        seen.append([a.step, a.sync_gradients, m.bias.item()])
        if epoch or len(seen) == 2:
            a.gradient_accumulation_steps = 3 if len(seen) < 8 else 1
print(json.dumps([seen, a.gradient_state.plugin_kwargs]))
"""
METRICS = """
import json, torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
a = Accelerator(cpu=True)
loader = a.prepare(DataLoader(torch.arange(7.), batch_size=2))
given = {
    "array": lambda b: b.numpy(), "text": lambda b: "x", "number": lambda b: 3, "texts": lambda b: ("a", "b"),
    "list": lambda b: [str(x) for x in b.tolist()], "mapping": lambda b: {"k": "v", "t": b},
    "none": lambda b: [None],
    "scalar": lambda b: b.sum(), "tensors": lambda b: (b, {"x": b + 1}),
}
found = {}
for batch in loader:
    for name, make in given.items():
        try:
            found.setdefault(name, []).append(repr(a.gather_for_metrics(make(batch))))
        except Exception as error:
            found.setdefault(name, []).append(type(error).__name__)
print(json.dumps(found))
"""
LOOKED_AT = """
import json, torch
from torch.utils.data import DataLoader, RandomSampler
from accelerate import Accelerator
a = Accelerator(cpu=True, rng_types=["torch", "generator"])
bare = torch.nn.Linear(1, 1)
with a.join_uneven_inputs([bare], even_batches=False):
    pass
m = torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
m, o = a.prepare(m, torch.optim.SGD(m.parameters(), lr=.1))
names = "skip_batches", "rng_types", "synchronized_generator", "_drop_last", "_non_blocking"
seen = [type(o.accelerator_state).__name__, a.state.device_mesh]
for more in ({}, {"drop_last": True}, {"sampler": RandomSampler(range(5), generator=torch.Generator())}):
    loader = a.prepare(DataLoader(torch.arange(5.), batch_size=2, **more))
    seen.append([type(getattr(loader, name)).__name__ + str(getattr(loader, name))[:5] for name in names])
    seen.append([len(batch) for batch in loader.base_dataloader])
state = a.get_state_dict(m)
seen.append([sorted(state), state._metadata])
print(json.dumps(seen))
"""
SAVED = """
import json, os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed
who, folder = os.environ["WHO"], os.environ["FOLDER"]
a = Accelerator(cpu=True)
set_seed(1, device_specific=True)
m = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
with torch.no_grad():
    for p in m.parameters():
        p.fill_(.1)
data = TensorDataset(torch.arange(32.).view(-1, 1) / 32)
m, o, loader = a.prepare(m, torch.optim.SGD(m.parameters(), lr=.01), DataLoader(data, batch_size=2))
for i, (batch,) in enumerate(loader):
    a.backward(m(batch).pow(2).mean())
    o.step(); o.zero_grad()
    if i == 2 and (who == "all" or a.is_main_process):
        a.save_state(folder)
a.wait_for_everyone()
torch.manual_seed(99 + a.process_index)
a.load_state(folder)
a.print(json.dumps([[p.detach().sum().item() for p in m.parameters()]]))
"""


@needs_accelerate
@pytest.mark.parametrize(
    "code", [HELPER, STEPS, METRICS, LOOKED_AT], ids=["helper", "steps", "metrics", "looked at"]
)
def test_the_same_is_seen_as_there(code, run_processes):
    variables = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"} if code == HELPER else {}
    assert said(run_processes, code, ours=True, environment=variables) == said(
        run_processes, code, ours=False, environment=variables
    )


@needs_accelerate
@pytest.mark.parametrize("who", ["all", "main"])
@pytest.mark.by_default
def test_a_state_is_saved_by_all_or_by_the_main_process_alone(tmp_path, monkeypatch, who, run_processes):
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    found = [
        said(
            run_processes,
            SAVED,
            ours=ours,
            processes=2,
            environment={"WHO": who, "FOLDER": str(tmp_path / str(ours)), "ACCELERATE_USE_CPU": "true"},
        )
        for ours in (True, False)
    ]
    assert found[0] == found[1]


def test_the_number_of_the_next_state_is_assigned(tmp_path):
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.project_configuration is project
    accelerator.project_configuration.iteration = 5
    accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_5").is_dir()
    assert project.iteration == accelerator.save_iteration == 6


def test_loader_settings_changed_later_count_for_what_is_prepared_then():
    config = DataLoaderConfiguration()
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    config.use_seedable_sampler = True
    assert accelerator.use_seedable_sampler
    accelerator.prepare()
    assert accelerator.run.config.data.use_seedable_sampler


def test_a_ddp_handler_assigned_later_is_the_strategys():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs()])
    accelerator.ddp_handler.find_unused_parameters = True
    accelerator.prepare()
    plugin = accelerator.run.plugins.get("ddp")
    assert plugin is None or plugin.config.find_unused_parameters


def test_under_fp16_there_is_a_scaler_before_prepare():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    before = accelerator.scaler
    model = torch.nn.Linear(1, 1)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert before.is_enabled()
    assert accelerator.scaler is before is optimizer.scaler
    assert Accelerator(cpu=True, mixed_precision="fp16").scaler is not before


def test_without_fp16_there_is_no_scaler():
    assert Accelerator(cpu=True).scaler is None


@pytest.mark.parametrize("name", ["_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"])
def test_what_is_prepared_is_listed_and_cannot_be_edited(name):
    accelerator = Accelerator(cpu=True)
    assert len(getattr(accelerator, name)) == 0
    with pytest.raises(AttributeError):
        getattr(accelerator, name).append(torch.nn.Linear(1, 1))
    with pytest.raises(AttributeError):
        setattr(accelerator, name, [])


def test_a_save_hook_that_pops_weights_writes_them_itself(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def save(models, weights, folder):
        torch.save(weights.pop(), f"{folder}/own.pt")

    def load(models, folder):
        kept = torch.load(f"{folder}/own.pt")
        models.pop().load_state_dict({name: each + 1 for name, each in kept.items()})

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    before = model.weight.detach().clone()
    accelerator.save_state(tmp_path / "here")
    assert (tmp_path / "here" / "own.pt").is_file()
    (file,) = (tmp_path / "here").glob("save-*/rank-00000.json")
    assert "model/weight" not in file.read_text()
    accelerator.load_state(tmp_path / "here")
    assert torch.equal(model.weight, before + 1)


def test_a_save_hook_that_changes_weights_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights[0].pop("bias"))
    with pytest.raises(NotServedError, match="changed weights"):
        accelerator.save_state(tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_where_there_is_nothing_to_load_it_is_a_value_error(tmp_path):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="does not exist"):
        accelerator.load_state(tmp_path / "none")
    with pytest.raises(CheckpointError):
        accelerator.load_state()


def test_a_second_accelerator_has_the_precision_of_the_first():
    first = Accelerator(cpu=True, mixed_precision="bf16")
    assert Accelerator().mixed_precision == "bf16"
    assert AcceleratorState().mixed_precision == first.mixed_precision == "bf16"


def test_the_state_of_a_loader_is_its_own_runs():
    first = Accelerator(cpu=True)
    loader = first.prepare(torch.utils.data.DataLoader([1.0, 2.0]))
    other = Accelerator()
    for _ in loader:
        assert first.gradient_state.in_dataloader
        assert GradientState().in_dataloader
        assert not other.gradient_state.in_dataloader
    assert first.gradient_state.active_dataloader is None


def test_clipping_goes_over_two_models_and_over_none(capsys):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    pairs = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    made = [accelerator.prepare(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in pairs]
    with accelerator.accumulate():
        accelerator.backward(sum(6 * m(torch.ones(1, 1)).sum() for m, _ in made))
        parameters = [p for m in pairs for p in m.parameters()]
        norm = accelerator.clip_grad_norm_(parameters, 1.0)
    assert norm.item() == pytest.approx(18**0.5)  # inside the window: 6 / 2 each, and not clipped
    assert parameters[0].grad.item() == 3
    assert "used up" not in capsys.readouterr().err
    assert accelerator.clip_grad_norm_(iter(()), 1.0) == 0
    assert "a generator that was used up?" in capsys.readouterr().err


def test_a_window_is_counted_without_a_prepared_model():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    seen = []
    for _ in range(4):
        with accelerator.accumulate(torch.nn.Linear(1, 1)):
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False, True]
