"""Weights are stored in few bits, and computed in many."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from accel_big_models import layerwise_casting
from accel_core import ConfigError


def saved_and_loaded(cast):
    file = io.BytesIO()
    torch.save(cast, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def test_weights_are_stored_in_one_dtype_and_outputs_are_those_of_the_cast_weights():
    cast, plain = model(), model()
    layerwise_casting(cast, torch.float8_e4m3fn, torch.float32)
    for layer in (plain[0], plain[2]):
        layer.to(torch.float8_e4m3fn).to(torch.float32)
    inputs = torch.randn(3, 8)

    assert {str(value.dtype) for value in cast.state_dict().values()} == {
        "torch.float8_e4m3fn",
        "torch.float32",
    }
    assert torch.equal(cast(inputs), plain(inputs))
    assert cast[0].weight.dtype == torch.float8_e4m3fn
    assert isinstance(cast[0].weight, nn.Parameter)


def test_gradients_reach_the_stored_weights():
    cast, plain = model(), model()
    layerwise_casting(cast, torch.bfloat16, torch.float32)
    for layer in (plain[0], plain[2]):
        layer.to(torch.bfloat16).to(torch.float32)
    inputs = torch.randn(3, 8)
    cast(inputs).sum().backward()
    plain(inputs).sum().backward()

    torch.testing.assert_close(cast[0].weight.grad, plain[0].weight.grad.bfloat16())


def test_an_error_in_a_layer_leaves_the_stored_weights():
    cast = model()
    layerwise_casting(cast, torch.float8_e4m3fn, torch.float32)
    with pytest.raises(RuntimeError):
        cast(torch.randn(3, 5))

    assert cast[0].weight.dtype == torch.float8_e4m3fn


class Stopped(nn.Linear):
    stops = False

    def forward(self, inputs):
        if self.stops:
            raise KeyboardInterrupt
        return super().forward(inputs)


def test_ctrl_c_in_a_layer_leaves_the_stored_weights():
    cast, inputs = nn.Sequential(Stopped(8, 8)), torch.randn(3, 8)
    layerwise_casting(cast, torch.bfloat16, torch.float32)
    cast[0].stops = True
    with pytest.raises(KeyboardInterrupt):
        cast(inputs)
    cast[0].stops = False
    with torch.no_grad():
        for weight in cast.parameters():
            weight.zero_()

    assert not cast(inputs).any()


def test_threads_are_inside_a_layer_together():
    cast, inputs = model(), torch.randn(64, 8)
    layerwise_casting(cast, torch.bfloat16, torch.float32)
    expected = cast(inputs)
    with ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(lambda _: cast(inputs), range(200)))

    assert all(torch.equal(each, expected) for each in outputs)
    assert cast[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
def test_a_copy_casts_too(duplicate):
    cast = model()
    layerwise_casting(cast, torch.float8_e4m3fn, torch.float32)
    inputs = torch.randn(3, 8)
    twin = duplicate(cast)

    assert torch.equal(twin(inputs), cast(inputs))
    assert twin[0].weight.dtype == torch.float8_e4m3fn


def test_removing_the_casting_leaves_an_ordinary_model():
    cast = model()
    remove = layerwise_casting(cast, torch.float8_e4m3fn, torch.float32, skip=["^2$"])
    assert cast[2].weight.dtype == torch.float32
    with pytest.raises(ConfigError, match="cast already"):
        layerwise_casting(cast, torch.float8_e4m3fn, torch.float32)
    remove()

    assert {it.dtype for it in cast.parameters()} == {torch.float32}
    assert "forward" not in vars(cast[0])


def test_a_model_without_such_layers_is_an_error():
    with pytest.raises(ConfigError, match="no linear"):
        layerwise_casting(nn.LayerNorm(4), torch.float8_e4m3fn, torch.float32)
