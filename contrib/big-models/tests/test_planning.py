"""A plan says what lies where, why, and what is left, before anything is loaded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_big_models import empty_weights, plan
from accel_big_models.planning import plan_from_map
from accel_big_models.sizes import available
from accel_core import ConfigError


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.second = nn.Sequential(nn.GELU(), nn.Linear(4 * width, width))


class Model(nn.Module):
    """Four blocks of 132 KB, an embedding of 25.6 KB that the head shares."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def test_devices_of_two_kinds_are_filled_in_order_and_ties_stay_together():
    made = plan(Model(), {"cuda:0": "450kB", "xpu:1": "140kB"})

    assert made.device_map["embedding"] == made.device_map["head"] == "cuda:0"
    assert made.device_map["blocks.2"] == "cuda:0"
    assert made.device_map["blocks.3"] == made.device_map["norm"] == "xpu:1"
    model = Model()
    assert sum(made.used.values()) == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_what_does_not_fit_on_devices_leaves_room_for_two_blocks_there():
    made = plan(Model(), {"disk": 10**9, "cpu": "150kB", "cuda:0": "450kB"})
    largest = max(part.size for part in made.places)

    assert made.device == torch.device("cuda:0")
    assert made.kept == 2 * largest
    assert made.used["cuda:0"] + made.kept <= 450_000
    assert list(made.used) == ["cuda:0", "cpu", "disk"]


def test_a_plan_prints_places_sizes_reasons_and_what_is_left():
    text = str(plan(Model(), {"cuda:0": "450kB", "xpu:1": "140kB"}))

    assert "head" in text
    assert "shares weights with embedding" in text
    assert "no room left on cuda:0" in text
    assert "cuda:0: 423 KB, 27.3 KB left of 450 KB" in text


def test_what_fits_nowhere_is_named_with_its_bytes():
    with pytest.raises(ConfigError, match=r"blocks\.1 \(132 KB\), blocks\.2 \(132 KB\)") as caught:
        plan(Model(), {"cpu": "200kB"})

    assert "'disk'" in str(caught.value).splitlines()[-1]


def test_a_block_that_cannot_be_streamed_is_an_error_with_its_name():
    with pytest.raises(ConfigError, match=r"blocks\.0, has 132 KB"):
        plan(Model(), {"cuda:0": "200kB", "cpu": "1GB"})


def test_a_dtype_halves_floating_weights_only():
    model = Model()
    whole, half = plan(model, {"cpu": 10**9}), plan(model, {"cpu": 10**9}, dtype=torch.bfloat16)

    assert half.used["cpu"] * 2 == whole.used["cpu"]


def test_classes_in_whole_are_not_divided():
    names = {part.name for part in plan(Model(), {"cpu": 10**9}, whole=["Block"]).places}
    leaves = {part.name for part in plan(Model(), {"cpu": 10**9}, whole=[]).places}

    assert "blocks.0" in names
    assert "blocks.0.second.1" in leaves
    with pytest.raises(ConfigError, match="no such module"):
        plan(Model(), {"cpu": 10**9}, whole=["Blok"])


@pytest.mark.parametrize("memory", [{"nowhere:0": 1}, {"cpu": "much"}])
def test_places_and_sizes_that_do_not_exist_are_errors(memory):
    with pytest.raises(ConfigError):
        plan(Model(), memory)


def test_a_device_map_may_divide_a_block():
    made = plan_from_map(Model(), {"": "cpu", "blocks.1.first": "disk"})

    assert made.place_of("blocks.1.first.weight") == "disk"
    assert made.place_of("blocks.1.second.1.bias") == "cpu"
    assert made.place_of("blocks.0.first.weight") == "cpu"


@pytest.mark.parametrize(
    ("places", "name"),
    [({"blocks": "cpu"}, "frequencies"), ({"": "cpu", "blok": "cpu"}, "blok"), ({"": None}, "place None")],
)
def test_a_map_with_gaps_or_unknown_names_is_an_error(places, name):
    with pytest.raises(ConfigError, match=name):
        plan_from_map(Model(), places)


def test_memory_that_caches_files_is_free(monkeypatch):
    told = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\nCached: 4990 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: told)

    assert available(torch.device("cpu")) == 5000 * 1024


def test_empty_weights_have_shapes_ties_and_real_buffers():
    with empty_weights():
        model = Model()

    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.frequencies, torch.arange(3.0))
    assert not any(parameter.is_meta for parameter in Model().parameters())


def test_a_parameter_that_two_modules_register_stays_one():
    with empty_weights():
        shared = nn.Parameter(torch.ones(2))
        first, second = nn.Module(), nn.Module()
        first.weight = shared
        second.weight = shared

    assert first.weight is second.weight
    assert first.weight.is_meta


def test_another_thread_builds_real_weights_meanwhile():
    made = []
    with empty_weights():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()

    assert not made[0].weight.is_meta
