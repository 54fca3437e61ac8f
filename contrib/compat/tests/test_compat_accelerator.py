"""Accelerator's arguments, attributes and habits, where they differ from accel-core's."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from pathlib import Path

import copied_states_job
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    DistributedType,
    FP8RecipeKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from peers import needs_accelerate, said

from accel_compat.unsupported import NotServedError
from accel_core import CheckpointError, Mesh, MeshDim, arrange


def trained(accelerator: Accelerator, steps: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize(
    "handler",
    [
        AutocastKwargs(cache_enabled=True),
        DistributedDataParallelKwargs(find_unused_parameters=True),
        GradScalerKwargs(growth_interval=10),
        InitProcessGroupKwargs(backend="gloo"),
        ProfileKwargs(activities=["cpu", "cuda"]),
    ],
    ids=lambda handler: type(handler).__name__,
)
def test_each_handler_is_taken_and_kept(handler):
    accelerator = Accelerator(kwargs_handlers=[handler])

    assert handler in vars(accelerator).values()


def test_a_setting_reaches_the_run():
    accelerator = Accelerator(
        kwargs_handlers=[GradScalerKwargs(growth_interval=10)],
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        project_config=ProjectConfiguration(project_dir="runs", total_limit=3),
        dynamo_plugin=TorchDynamoPlugin(backend="eager", fullgraph=True),
    )
    config = accelerator.run.config

    assert config.grad_scaler.growth_interval == 10
    assert not config.data.even_batches
    assert not accelerator.even_batches
    assert (config.project.project_dir, config.project.total_limit, accelerator.logging_dir) == (
        "runs",
        3,
        "runs",
    )
    assert (config.compile.backend, config.compile.fullgraph) == ("eager", True)


def test_two_handlers_of_a_class_are_refused():
    with pytest.raises(ValueError, match="You can only pass one `AutocastKwargs`"):
        Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()])


def test_what_is_no_handler_is_refused():
    with pytest.raises(ValueError, match="Unsupported kwargs handler"):
        Accelerator(kwargs_handlers=[object()])


def test_steps_and_plugin_together_are_refused():
    with pytest.raises(ValueError, match="You can only pass one of `gradient_accumulation_steps`"):
        Accelerator(
            gradient_accumulation_steps=2,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        )


def test_a_precision_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="Unknown mixed_precision mode: fp17"):
        Accelerator(mixed_precision="fp17")


def test_fp8_by_ms_amp_is_refused_with_the_reason():
    with pytest.raises(NotServedError, match=r"MS-AMP is no longer maintained.*\n.*AORecipeKwargs"):
        Accelerator(mixed_precision="fp8", kwargs_handlers=[FP8RecipeKwargs(backend="msamp")])


@pytest.mark.parametrize(
    ("cls", "wrong", "right"),
    [
        (GradScalerKwargs, "backoff_filter", "backoff_factor"),
        (FP8RecipeKwargs, "optimization_level", "opt_level"),
    ],
)
def test_an_argument_of_another_name_is_answered_with_the_right_one(cls, wrong, right):
    with pytest.raises(TypeError, match=f"'{wrong}'; did you mean '{right}'"):
        cls(**{wrong: 1})


def test_the_oldest_spelling_of_precision_is_understood():
    assert Accelerator(fp16=False).mixed_precision == "no"


@pytest.mark.parametrize(
    ("variable", "value", "look"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", lambda accelerator: accelerator.mixed_precision == "bf16"),
        ("ACCELERATE_USE_CPU", "true", lambda accelerator: accelerator.device.type == "cpu"),
        (
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            "4",
            lambda accelerator: accelerator.gradient_accumulation_steps == 4,
        ),
        (
            "ACCELERATE_DYNAMO_BACKEND",
            "eager",
            lambda accelerator: accelerator.run.config.compile.backend == "eager",
        ),
    ],
)
def test_a_variable_stands_for_an_argument_that_was_not_given(monkeypatch, variable, value, look):
    monkeypatch.setenv(variable, value)

    assert look(Accelerator())


def test_the_loss_is_divided_outside_accumulate_too():
    whole, halved = Accelerator(), None
    one = trained(whole, steps=1)
    whole.end_training()
    halved = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    start = torch.nn.Linear(3, 1).weight.detach()

    assert torch.allclose(trained(halved, steps=1) - start, (one - start) / 2)


def test_what_is_nothing_to_prepare_comes_back_as_it_is(capsys):
    accelerator = Accelerator()
    text = "not a model"
    model, same = accelerator.prepare(torch.nn.Linear(1, 1), text)

    assert same is text
    assert isinstance(model, torch.nn.Module)


def test_prepared_objects_are_listed_until_memory_is_freed():
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (len(accelerator._models), len(accelerator._optimizers)) == (1, 1)
    accelerator.free_memory()
    assert (accelerator._models, accelerator._optimizers, accelerator._dataloaders) == ((), (), ())


def test_alone_gathering_changes_nothing():
    accelerator = Accelerator()
    loss = torch.tensor(2.0)

    assert accelerator.gather(loss) is loss
    assert accelerator.distributed_type is DistributedType.NO


def test_metrics_are_cut_to_the_samples_of_the_last_round():
    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(10.0), batch_size=4))
    lengths = [len(accelerator.gather_for_metrics(torch.ones(4))) for _ in loader]

    assert lengths == [4, 4, 2]


def test_save_state_returns_the_path_that_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    assert accelerator.save_state("here") == Path("here")
    assert accelerator.save_state(tmp_path / "there") == tmp_path / "there"


def save_with_gradients(folder):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(CheckpointError, match="gradients that no optimizer has applied") as error:
        accelerator.save_state(folder)
    assert "optimizer.zero_grad()" in str(error.value)
    optimizer.zero_grad()
    return str(accelerator.save_state(folder))


def test_a_save_that_the_main_process_refuses_for_its_gradients_is_refused_on_all_ranks(
    tmp_path, run_processes
):
    assert run_processes(save_with_gradients, str(tmp_path / "here")) == [str(tmp_path / "here")] * 2


TRIGGERED = """
import json, torch
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
batch = torch.arange(4.0).view(2, 2) + accelerator.process_index
for _ in range(2):
    with accelerator.no_sync(model):
        first, second = model(batch).sum(), model(batch).pow(2).sum()
    accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    print(json.dumps([p.tolist() for p in model.parameters()]))
"""


@needs_accelerate
def test_a_backward_reduces_what_forwards_under_no_sync_left(run_processes):
    assert said(run_processes, TRIGGERED, ours=True, processes=2) == said(
        run_processes, TRIGGERED, ours=False, processes=2
    )


def test_hooks_see_what_is_saved_and_loaded(tmp_path):
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    seen = []
    saving = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: seen.append((models, weights, folder))
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append((models, folder)))
    folder = accelerator.save_state(tmp_path / "here")
    saving.remove()
    accelerator.save_state(tmp_path / "there")
    accelerator.load_state(tmp_path / "here")

    (models, weights, first), (again, second) = seen
    assert models == again == [model]
    assert second == str(folder)
    assert first.endswith("/here")
    assert set(weights[0]) == {"weight", "bias"}


def test_training_is_accel_cores():
    ours = trained(Accelerator(mixed_precision="bf16"))

    assert torch.isfinite(ours).all()


def test_ranks_along_the_mesh_are_those_of_the_run():
    accelerator = Accelerator()
    dims = arrange([MeshDim("dp_replicate", 2), MeshDim("dp_shard", 2), MeshDim("tp", 2)], 8)
    assert (accelerator.tensor_parallel_rank, accelerator.torch_device_mesh) == (0, None)
    accelerator.run.mesh = Mesh(dims, rank=6, device_mesh="torch's")

    assert accelerator.torch_device_mesh == "torch's"
    assert (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank) == (1, 1)
    assert (accelerator.tensor_parallel_rank, accelerator.context_parallel_rank) == (0, 0)


def test_the_context_that_shares_sequences_does_nothing_where_nobody_shares_them():
    buffer = torch.ones(2)
    with Accelerator().maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[0]):
        assert buffer.shape == (2,)


@pytest.mark.needs("accel-stores")
def test_a_state_may_lie_at_a_url():
    numbered = ProjectConfiguration("memory://compat/run", automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=numbered)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    weight = model.weight.detach().clone()
    saved = [accelerator.save_state(), accelerator.save_state()]
    for given in (None, saved[0]):
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state(given)
        assert torch.equal(model.weight, weight)

    assert saved == [f"memory://compat/run/checkpoints/checkpoint_{number}" for number in (0, 1)]


def test_hooks_of_states_take_no_url():
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(NotServedError, match="memory://compat/hooked is a URL\nsave to a local folder"):
        accelerator.save_state("memory://compat/hooked")


@pytest.mark.needs("accel-stores")
def test_a_url_without_a_checkpoint_is_said():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="memory://compat/missing"):
        accelerator.load_state("memory://compat/missing")


@pytest.mark.needs("accel-stores")
def test_states_that_are_copied_to_a_store_hold_the_random_numbers_of_all_ranks(tmp_path, run_processes):
    shared = {"COPIED_STATES": str(tmp_path / "store")}
    mirror = {"ACCEL__EXTENSIONS": "mirror", "ACCEL__MIRROR__URL": "memory://bucket/run"}
    first, copies = str(tmp_path / "first"), "memory://bucket/run"
    drawn = run_processes(copied_states_job.saved, first, world=2, environment=shared | mirror)
    assert drawn[0] != drawn[1]
    for there, (found, number) in zip(
        drawn, run_processes(copied_states_job.resumed, copies, world=2, environment=shared), strict=True
    ):
        assert found == there, "it goes on as if nothing had happened"
        assert number == 2, "beyond the store's"


def test_a_run_in_the_folder_of_another_returns_the_folders_that_it_wrote(tmp_path, run_processes):
    for first in (0, 2):
        names = [str(tmp_path / "checkpoints" / f"checkpoint_{first + more}") for more in range(2)]
        assert run_processes(copied_states_job.counted_on, str(tmp_path), world=2) == [names] * 2


@pytest.mark.needs("accel-stores")
def test_hooks_of_states_are_refused_where_states_are_copied(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCEL__EXTENSIONS", "mirror")
    monkeypatch.setenv("ACCEL__MIRROR__URL", "memory://compat/hooks")
    accelerator = Accelerator(project_config=ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True))
    accelerator.prepare(torch.nn.Linear(1, 1))
    saving = accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(
        NotServedError, match="copies checkpoints without these\nremove the hooks, or the ext"
    ):
        accelerator.save_state()
    saving.remove()
    accelerator.save_state()
    accelerator.register_load_state_pre_hook(lambda models, folder: None)
    with pytest.raises(NotServedError, match="copies checkpoints without these"):
        accelerator.load_state()
    accelerator.load_state(tmp_path / "checkpoints/checkpoint_0")
    accelerator.end_training()


def test_arguments_that_mean_nothing_here_are_said(tmp_path, capsys):
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "here", safe_serialization=False)
    accelerator.load_state(tmp_path / "here", load_kwargs={"weights_only": False})
    said = capsys.readouterr().err

    assert "save_state: weights are always written by safetensors" in said
    assert "load_state: arguments for torch.load have no effect" in said


def test_load_state_refuses_an_argument_that_would_change_what_is_loaded(tmp_path):
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "here")

    with pytest.raises(TypeError, match="no argument 'load_module_only': it loads all\nleave it out"):
        accelerator.load_state(tmp_path / "here", map_location="cpu", load_module_only=True)


def test_a_pickled_accelerator_is_itself_in_its_process_and_an_error_where_it_is_not(run_command):
    accelerator = Accelerator()
    kept = pickle.dumps(accelerator)
    assert pickle.loads(kept) is accelerator

    program = f"import pickle; pickle.loads({kept!r})"
    read = run_command([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "another process than its own" in read.stderr


def test_an_accelerator_works_after_its_states_were_reset():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    AcceleratorState._reset_state(reset_partial_state=True)

    assert (accelerator.num_processes, accelerator.is_main_process) == (1, True)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert accelerator.gather(torch.ones(2)).tolist() == [1, 1]


def test_a_loader_goes_with_its_accelerator_at_once():
    accelerator = Accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader([1.0, 2.0]))
    batches = iter(loader)
    next(batches)
    gone = weakref.ref(accelerator), weakref.ref(loader)
    del accelerator, loader, batches

    assert [each() for each in gone] == [None, None]


def test_a_model_goes_with_its_accelerator_although_the_states_stay():
    accelerator, model = Accelerator(), torch.nn.Linear(1, 1)
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gone = weakref.ref(model)
    del accelerator, model, prepared
    gc.collect()

    assert gone() is None
    assert AcceleratorState().num_processes == 1


def test_what_was_prepared_trains_on_without_its_accelerator():
    model = torch.nn.Linear(1, 1)
    model, optimizer = Accelerator().prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.item()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()

    assert model.weight.item() != before


def test_where_its_state_alone_was_reset_an_accelerator_does_not_know_the_world():
    accelerator = Accelerator()
    accelerator.state._reset_state()

    with pytest.raises(AttributeError, match=r"This happens if `AcceleratorState\._reset_state\(\)`"):
        _ = accelerator.num_processes


def test_a_prepared_loader_comes_out_of_a_pickle_as_itself():
    loader = Accelerator().prepare(torch.utils.data.DataLoader([1.0, 2.0]))

    assert pickle.loads(pickle.dumps(loader)) is loader


@pytest.mark.parametrize("which", ["on_process", "on_local_process"])
def test_a_process_that_is_alone_runs_what_is_for_another(which):
    accelerator = Accelerator(cpu=True)
    index = {which.removeprefix("on_") + "_index": 3}

    assert getattr(accelerator, which)(**index)(lambda: "ran")() == "ran"


def test_it_says_what_it_was_made_with():
    accelerator = Accelerator(cpu=True, device_placement=False, step_scheduler_with_optimizer=False)

    assert (accelerator.device_placement, accelerator.step_scheduler_with_optimizer) == (False, False)
    assert (accelerator.has_fp8_handler, accelerator.delayed_fp8_autocast) == (False, False)


def test_what_accelerate_itself_saved_is_named_with_how_to_bring_it_over(tmp_path):
    (tmp_path / "random_states_0.pkl").touch()
    with pytest.raises(
        ValueError, match=r"saved by Accelerate itself.*\n.*checkpoint import --format"
    ) as caught:
        Accelerator(cpu=True).load_state(tmp_path)
    assert str(tmp_path) in str(caught.value)
