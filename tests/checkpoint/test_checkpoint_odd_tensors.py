"""What files cannot hold is refused by name, and strict=False leaves out what does not fit."""

from __future__ import annotations

import logging

import pytest
import torch
from lookup import home_of
from safetensors.torch import load_file
from torch import nn

from accel_core import Accelerator, CheckpointError


@pytest.fixture
def accelerator():
    made = Accelerator(device="cpu")
    yield made
    made.end_training()


class Graph(nn.Linear):
    """Has a buffer."""

    def __init__(self, buffer):
        super().__init__(2, 2)
        self.register_buffer("edges", buffer)


class View(nn.Linear):
    """Tells of parts of its weight as of tensors of their own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}turned"] = torch.arange(6.0).view(2, 3).T
        destination[f"{prefix}one"] = self.table
        destination[f"{prefix}other"] = self.table[:1]


ODD = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


@pytest.mark.filterwarnings("ignore:.*(in beta|nested tensors|uantize|sparse)")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("how", ["save_state", "save_model"])
def test_tensors_that_are_not_their_elements_are_refused_by_name(accelerator, tmp_path, kind, how):
    model = accelerator.prepare(Graph(ODD[kind]()))
    given = (tmp_path / "here",) if how == "save_state" else (model, tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"edges.* is .*cannot be stored\nmake it an ordinary tensor"):
        getattr(accelerator, how)(*given)


@pytest.mark.parametrize("how", ["save_state", "save_model"])
def test_lazy_modules_are_refused_by_name_before_their_first_batch(accelerator, tmp_path, how):
    model = accelerator.prepare(nn.Sequential(nn.LazyLinear(2)))
    given = (tmp_path / "here",) if how == "save_state" else (model, tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"0\.weight.* is a lazy tensor"):
        getattr(accelerator, how)(*given)


@pytest.mark.parametrize("wait", [True, False])
def test_dtypes_that_torch_does_not_copy_are_saved(accelerator, tmp_path, wait):
    codes = torch.arange(8, dtype=torch.uint8)
    accelerator.prepare(Graph(codes.view(torch.int4)))
    accelerator.save_state(tmp_path / "ck", wait=wait)
    accelerator.wait_for_checkpoint()
    assert (home_of(tmp_path / "ck") / "rank-00000.safetensors").read_bytes().endswith(bytes(range(8)))


def test_tensors_of_a_modules_own_account_are_written_as_weights_are(accelerator, tmp_path):
    model = View(2, 2)
    model.table = torch.arange(4.0)
    accelerator.save_model(accelerator.prepare(model), tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found["turned"].tolist() == torch.arange(6.0).view(2, 3).T.tolist()
    assert (found["one"].tolist(), found["other"].tolist()) == ([0, 1, 2, 3], [0])


def train(accelerator, model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_without_strict_a_head_of_another_shape_is_left_out_with_its_moments(tmp_path, caplog):
    first = Accelerator(device="cpu")
    saved, _ = train(first, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    first.save_state(tmp_path / "here")
    body = saved[0].weight.tolist()
    first.end_training()
    second = Accelerator(device="cpu")
    model, optimizer = train(second, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    head = model[1].weight.tolist()
    with pytest.raises(CheckpointError, match=r"1\.weight has shape \[2, 4\].*, \[5, 4\] here"):
        second.load_state(tmp_path / "here")
    assert "begins anew" not in caplog.text
    with caplog.at_level(logging.WARNING):
        second.load_state(tmp_path / "here", strict=False)
    assert (model[0].weight.tolist(), model[1].weight.tolist()) == (body, head)
    assert "Adam begins anew with 1.bias, 1.weight" in caplog.text
    assert optimizer.state[model[0].weight]["step"] == 2
    assert not optimizer.state.get(model[1].weight)
    second.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    assert optimizer.state[model[1].weight]["step"] == 1
    second.end_training()


def test_without_strict_a_head_that_is_tied_no_more_is_left_out(tmp_path):
    first = Accelerator(device="cpu")
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    first.prepare(tied)
    first.save_state(tmp_path / "here")
    first.end_training()
    second = Accelerator(device="cpu")
    model = second.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    head = model[1].weight.tolist()
    with pytest.raises(CheckpointError, match=r"1\.weight was tied to 0\.weight"):
        second.load_state(tmp_path / "here")
    second.load_state(tmp_path / "here", strict=False)
    assert (model[0].weight.tolist(), model[1].weight.tolist()) == (tied[0].weight.tolist(), head)
    second.end_training()


@pytest.mark.parametrize(
    ("saved", "here", "fits"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.int16, torch.int32, True),
        (torch.float32, torch.float8_e4m3fn, False),
        (torch.uint16, torch.int16, False),
        (torch.uint16, torch.float8_e5m2, False),
        (torch.float8_e5m2, torch.uint16, False),
        (torch.uint16, torch.complex64, False),
    ],
)
def test_numbers_are_read_as_another_dtype_where_it_holds_them(tmp_path, saved, here, fits):
    first = Accelerator(device="cpu")
    first.prepare(Graph(torch.tensor([1.0, 2.0]).to(saved)))
    first.save_state(tmp_path / "here")
    first.end_training()
    second = Accelerator(device="cpu")
    model = second.prepare(Graph(torch.zeros(2).to(here)))
    if not fits:
        with pytest.raises(CheckpointError, match="edges is .* in the checkpoint; .* may lose digits"):
            second.load_state(tmp_path / "here")
    second.load_state(tmp_path / "here", strict=fits)
    assert model.edges.real.to(torch.float32).tolist() == [1, 2]
    second.end_training()


def test_a_tall_table_is_read_as_another_dtype_to_its_last_row(tmp_path):
    table = torch.arange(6_000_000, dtype=torch.int32).view(-1, 2)  # more than is read at once
    first = Accelerator(device="cpu")
    first.prepare(Graph(table))
    first.save_state(tmp_path / "here")
    first.end_training()
    second = Accelerator(device="cpu")
    model = second.prepare(Graph(torch.zeros_like(table, dtype=torch.int64)))
    second.load_state(tmp_path / "here")
    assert torch.equal(model.edges, table.long())
    second.end_training()


def test_large_tensors_of_keys_that_read_alike_are_kept_apart(accelerator, tmp_path):
    class Keeper:
        held = {"a.b": torch.ones(20000), "a": {"b": torch.zeros(20000)}}  # noqa: RUF012

        def state_dict(self):
            return self.held

        def load_state_dict(self, state):
            self.held = state

    keeper = Keeper()
    accelerator.register_for_checkpointing(keeper)
    accelerator.save_state(tmp_path / "here")
    keeper.held = {}
    accelerator.load_state(tmp_path / "here")
    assert (keeper.held["a.b"].sum(), keeper.held["a"]["b"].sum()) == (20000, 0)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8
def test_a_loop_with_a_closure_may_save_after_its_step(accelerator, tmp_path):
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)
    stepped = model.weight.detach().clone()
    accelerator.save_state(tmp_path / "here")
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path / "here")
    assert torch.equal(model.weight, stepped)


def test_a_buffer_made_by_expand_is_refused_when_it_is_saved(tmp_path):
    accelerator, module = Accelerator(device="cpu"), nn.Linear(2, 2)
    module.register_buffer("mask", torch.zeros(1).expand(4))
    accelerator.prepare(module)
    with pytest.raises(CheckpointError, match="buffer mask was made by expand"):
        accelerator.save_state(tmp_path / "ck")
    accelerator.end_training()
