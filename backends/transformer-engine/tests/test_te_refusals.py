"""What this precision cannot be combined with is refused before anything computes."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from te_problem import TIMEOUT, accelerator, batches, loss_of, model, steps_of

from accel_core import Accelerator, AccelError, ConfigError
from accel_transformer_engine import TransformerEngineConfig, card
from accel_transformer_engine.card import FP8


def compiled(recipe: str) -> Accelerator:
    config = TransformerEngineConfig(recipe=recipe)
    return Accelerator(device="cpu", mixed_precision="fp8-te", plugins=[config], dynamo_backend="eager")


def test_delayed_scaling_is_not_compiled() -> None:
    run = compiled("delayed")
    with pytest.raises(ConfigError, match=r"recipe delayed: .*not compile.*\n.*recipe: current"):
        run.prepare(model())
    run.end_training()


def split() -> str:
    plan = {"block.up": "colwise", "block.down": "rowwise"}
    from accel_fsdp import TorchTensorParallelPlugin

    plugins = [TIMEOUT, TorchTensorParallelPlugin(tp_size=2, parallelize_plan=plan)]
    run = Accelerator(device="cpu", strategy="fsdp", mixed_precision="fp8-te", plugins=plugins)
    with pytest.raises(ConfigError) as caught:
        run.prepare(model())
    run.end_training()
    return str(caught.value)


@pytest.mark.needs("accel-fsdp")
@pytest.mark.timeout(200)
def test_layers_that_a_plan_splits_are_refused(run_processes) -> None:
    for said in run_processes(split, world=2, timeout=100):
        assert "cannot compute with weights that a tensor-parallel plan has split" in said
        assert said.endswith("leave out tensor parallelism, or use mixed_precision: fp8-torchao")


def test_an_optimizer_without_its_model_is_refused_and_after_it_trains_the_same() -> None:
    """Accelerate takes both in one call only."""
    run = accelerator()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(AccelError, match="prepare the model it belongs to in the same call or before"):
        run.prepare(optimizer)
    run.end_training()
    losses = []
    for at_once in (True, False):
        run = accelerator()
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = (
            run.prepare(net, optimizer) if at_once else (run.prepare(net), run.prepare(optimizer))
        )
        losses.append([*steps_of(run, net, optimizer, batches()), loss_of(net, batches(1)[0]).item()])
        run.end_training()
    assert losses[0] == losses[1]


def test_a_prepared_model_is_copied_and_pickling_it_says_what_to_do() -> None:
    run = accelerator()
    net = run.prepare(model())
    inner = run.unwrap_model(net)
    (ids,) = batches(1)
    assert torch.equal(deepcopy(inner)(ids), inner(ids))
    with pytest.raises(AccelError, match=r"a Linear that fp8-te has converted cannot be pickled") as caught:
        pickle.dumps(inner)
    assert str(caught.value).endswith("or pickle the model after accelerator.end_training()")
    run.end_training()
    assert torch.equal(pickle.loads(pickle.dumps(inner))(ids), inner(ids))


def test_gaudis_own_library_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVIDIA's, whose installation would be no remedy there."""
    installed = {"habana_frameworks"}
    monkeypatch.setattr(card, "find_spec", lambda name: name if name in installed else None)
    assert FP8.probe is not None
    reason = str(FP8.probe())
    assert "scales are not documented, so no checkpoint could hold them" in reason
    assert reason.endswith("set mixed_precision: bf16")
    installed.clear()
    assert "pip install 'transformer-engine[pytorch]'" in str(FP8.probe())
