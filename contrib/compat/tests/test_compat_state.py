"""The process-wide states are views of the current run."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import DistributedType, GradientAccumulationPlugin


def test_a_partial_state_needs_no_accelerator():
    state = PartialState(cpu=True)

    assert (state.process_index, state.num_processes, state.device.type) == (0, 1, "cpu")
    assert state.distributed_type == DistributedType.NO == "NO"
    assert state.is_main_process
    assert state.is_last_process
    assert not state.use_distributed


def test_the_default_device_is_what_torch_finds():
    expected = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert PartialState(cpu=True).default_device == expected


def test_all_instances_are_one():
    assert PartialState().__dict__ is PartialState().__dict__ is PartialState._shared_state
    PartialState._reset_state()
    assert PartialState._shared_state == {}


def test_an_attribute_asked_for_after_a_reset_says_what_happened():
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(AttributeError, match=r"happens if `PartialState._reset_state\(\)` was called"):
        state.device  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'coffee'"):
        state.coffee  # noqa: B018


def test_the_accelerators_state_knows_its_precision():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")

    assert is_initialized()
    assert AcceleratorState().mixed_precision == accelerator.state.mixed_precision == "bf16"


def test_the_accelerators_state_needs_an_accelerator_as_there():
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        AcceleratorState()
    PartialState(cpu=True)
    with pytest.raises(ValueError, match="properly initialize your accelerator"):
        AcceleratorState(mixed_precision="bf16")
    assert not is_initialized()
    assert Accelerator().mixed_precision == "no"


def test_an_accelerator_goes_where_the_partial_state_was_put():
    PartialState(cpu=True)
    accelerator = Accelerator()

    assert accelerator.run.resolved.origins["device"].startswith("Accelerator")
    assert (accelerator.device.type, accelerator.state._cpu, PartialState()._cpu) == ("cpu", True, True)


def test_another_precision_needs_a_reset_first():
    Accelerator(mixed_precision="bf16")
    with pytest.raises(ValueError, match="already been initialized and cannot be changed"):
        Accelerator(mixed_precision="no")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(mixed_precision="no").mixed_precision == "no"


def test_no_strategy_has_a_plugin_unless_it_is_asked_for():
    assert not hasattr(Accelerator().state, "fsdp_plugin")


@pytest.mark.needs("accel-fsdp")
def test_a_strategy_that_a_variable_asks_for_has_a_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert type(Accelerator().state.fsdp_plugin).__name__ == "FullyShardedDataParallelPlugin"


def test_the_gradient_state_follows_accumulate():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    seen = []
    for _ in range(4):
        with accelerator.accumulate(model):
            seen.append(GradientState().sync_gradients)

    assert seen == [False, True, False, True]
    assert GradientState().num_steps == 2


def test_what_counts_micro_batches_by_itself_sets_the_boundary():
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(
        model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 1.0)
    )
    before = model.weight.detach().clone()
    model(torch.ones(1, 1)).sum().backward()
    accelerator.gradient_state._set_sync_gradients(False)
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert not accelerator.sync_gradients
    accelerator.gradient_state._set_sync_gradients(True)
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_the_gradient_state_knows_the_loader():
    accelerator = Accelerator()
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(torch.arange(10), batch_size=4))
    state = GradientState()
    seen = [(state.in_dataloader, state.end_of_dataloader, state.remainder) for _ in loader]

    assert seen == [(True, False, 2), (True, False, 2), (True, True, 2)]
    assert not state.in_dataloader
    assert state.remainder == -1


def test_a_plugins_settings_are_kept():
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    )

    assert accelerator.gradient_accumulation_steps == 3
    assert not accelerator.gradient_state.sync_with_dataloader
    assert accelerator.gradient_state.plugin_kwargs == {"num_steps": 3, "sync_with_dataloader": False}


def test_a_plugin_that_the_gradient_state_is_given_sets_the_windows():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    GradientState(GradientAccumulationPlugin(num_steps=2))
    seen = []
    for _ in range(3):
        with accelerator.accumulate(model):
            seen.append(accelerator.sync_gradients)

    assert (GradientState().num_steps, accelerator.gradient_accumulation_steps) == (2, 2)
    assert seen == [False, True, False]


def test_batches_that_a_dataset_makes_have_no_remainder():
    accelerator = Accelerator()
    dataset = [torch.arange(3), torch.arange(3)]
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(dataset, batch_size=None))

    assert [accelerator.gradient_state.remainder for _ in loader] == [-1, -1]


def test_decorators_run_on_the_ranks_they_name():
    state = PartialState()

    assert state.on_main_process(lambda: 1)() == state.on_last_process(lambda: 1)() == 1
    assert state.on_process(lambda: 1, process_index=0)() == 1


def test_logging_makes_no_state():
    with pytest.raises(RuntimeError, match="You must initialize the accelerate state"):
        get_logger(__name__).info("too early")
    assert not is_initialized()
    assert PartialState._shared_state == {}
