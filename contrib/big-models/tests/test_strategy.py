"""A model larger than its device in an ordinary run: prepare, train adapters, save, export."""

from __future__ import annotations

import pytest
import torch
from big_model_problems import Model, ids, model, shards
from safetensors.torch import load_file
from torch import nn

from accel_big_models import DispatchedPlugin, empty_weights, engine, load, weights_of
from accel_big_models.engine import values_of
from accel_big_models.hooks import enters_of
from accel_big_models.planning import plan_from_map
from accel_core import Accelerator, AccelError, CheckpointError, ConfigError


@pytest.fixture
def accelerator():
    made = Accelerator(cpu=True, strategy="dispatched")
    yield made
    made.end_training()


def streamed(folder) -> Model:
    with empty_weights():
        target = Model()
    return load(target, folder, plan_from_map(target, {"": "disk"}), mapped=False)


@pytest.fixture
def folder(tmp_path):
    return shards(tmp_path / "c", model())


def test_a_dispatched_model_is_prepared_as_it_is(accelerator, folder):
    prepared = accelerator.prepare(streamed(folder))
    with torch.no_grad():
        torch.testing.assert_close(prepared(ids()), model()(ids()))

    assert enters_of(prepared)


def test_giving_memory_back_reads_no_weight(accelerator, folder, monkeypatch):
    accelerator.prepare(streamed(folder))
    read = []
    monkeypatch.setattr(engine, "values_of", lambda source: read.append(source) or values_of(source))
    accelerator.free_memory()

    assert read == []


def test_save_model_streams_whole_weights(accelerator, folder, tmp_path):
    prepared = accelerator.prepare(streamed(folder))
    accelerator.save_model(prepared, tmp_path / "out", max_shard_size="20kB")
    state = model().state_dict()
    got = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        got |= load_file(path)

    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert got.keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(value, state[name]) for name, value in got.items())


def test_a_checkpoint_goes_out_and_comes_back(accelerator, folder, tmp_path):
    target = streamed(folder)
    prepared = accelerator.prepare(target)
    accelerator.save_state(tmp_path / "one")
    other = Accelerator(cpu=True)
    changed = other.prepare(model(seed=7))
    other.save_state(tmp_path / "two")
    other.end_training()
    with torch.no_grad():
        prepared(ids())
        accelerator.load_state(tmp_path / "two")
        torch.testing.assert_close(prepared(ids()), changed(ids()))
        accelerator.load_state(tmp_path / "one")
        torch.testing.assert_close(prepared(ids()), model()(ids()))


class Adapted(nn.Module):
    """A frozen linear layer with a part that trains."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.adapter = nn.Linear(layer.in_features, layer.out_features, bias=False)
        nn.init.zeros_(self.adapter.weight)

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


def adapted(base: Model) -> Model:
    base.requires_grad_(False)
    for block in base.blocks:
        torch.manual_seed(2)
        block.first = Adapted(block.first)
    return base


def losses(accelerator, target) -> list[float]:
    optimizer = torch.optim.AdamW([it for it in target.parameters() if it.requires_grad], lr=0.01)
    target, optimizer = accelerator.prepare(target, optimizer)
    seen = []
    for _ in range(3):
        loss = target(ids()).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_adapters_train_while_their_frozen_base_comes_and_goes(precision, monkeypatch):
    from accel_big_models import writing

    # Without mapping, so that the engine of a device runs.
    monkeypatch.setattr(writing, "OpenFile", lambda path, mapped: writing_file(path, mapped=False))
    from accel_big_models.files import OpenFile as writing_file

    plain = Accelerator(cpu=True, mixed_precision=precision)
    expected = losses(plain, adapted(model()))
    plain.end_training()
    plugin = DispatchedPlugin(device_map={"": "cpu", "blocks": "disk"})
    accelerator = Accelerator(cpu=True, strategy="dispatched", plugins=[plugin], mixed_precision=precision)
    target = adapted(model())
    got = losses(accelerator, target)
    accelerator.end_training()

    assert expected[-1] < expected[0]
    assert got == pytest.approx(expected, rel=1e-5)
    assert enters_of(target)


def test_an_optimizer_over_weights_that_come_and_go_is_refused_by_name(accelerator, folder):
    target = streamed(folder)
    with pytest.raises(ConfigError, match=r"optimizer holds .* whose values come and go"):
        accelerator.prepare(target, torch.optim.SGD(target.parameters(), lr=0.1))


def test_another_strategy_names_the_weight_and_the_strategy_to_take(folder):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AccelError, match="choose a strategy that can: dispatched") as caught:
        accelerator.prepare(streamed(folder))
    assert "scale" in str(caught.value)
    with empty_weights():
        empty = Model()
    with pytest.raises(AccelError, match=r"scale of the Model is on the meta device(.|\n)*dispatched"):
        accelerator.prepare(empty)
    accelerator.end_training()


def test_another_strategy_saves_no_weight_whose_values_are_away(folder, tmp_path):
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(streamed(folder), device_placement=[False])
    with torch.no_grad():
        assert torch.equal(prepared(ids()), model()(ids()))

    for save in (accelerator.save_model, lambda _, to: accelerator.save_state(to)):
        with pytest.raises(
            CheckpointError, match="scale of the Model is loaded only while it is used(.|\n)*dispatched"
        ):
            save(prepared, tmp_path / "out")
    with (
        pytest.raises(CheckpointError, match="scale of the Model is loaded only while it is used"),
        accelerator.full_parameters(prepared),
    ):
        pass
    accelerator.end_training()


def test_the_init_context_builds_without_memory(accelerator, folder):
    with accelerator.model_init_context():
        target = Model()
    assert target.scale.is_meta
    with pytest.raises(ConfigError, match="on the meta device"):
        accelerator.prepare(target)
    prepared = accelerator.prepare(load(target, folder))

    assert torch.equal(dict(weights_of(prepared))["scale"], model().scale)
