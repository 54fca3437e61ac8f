"""State that is cut up, by FSDP2, as DTensors, or in flat ranges, goes on in any other form."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import sharded_job
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_core import flat_range
from accel_testing.simulated import write_distribution

WAYS = [("whole", 1), ("whole", 2), ("shards", 2), ("shards", 3), ("tensor", 2), ("flat", 1), ("flat", 3)]

NEEDS_MEANS = pytest.mark.skipif(
    torch.__version__ < "2.9",  # torch compares its releases by their numbers
    reason="fully_shard asks gloo for means and gets sums: pytorch#162338",
)


@pytest.fixture(autouse=True)
def toys(tmp_path, monkeypatch):
    names = ("whole", "shards", "tensor", "flat", "stages")
    lines = "".join(f"{name} = sharded_cards:{name.upper()}\n" for name in names)
    write_distribution(tmp_path / "site", "sharded-toys", f"[accel_core.strategy]\n{lines}")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def run(run_processes, function, *args, world):
    return run_processes(function, *args, world=world, timeout=60)


def check_all_pairs(run_processes, folder, optimizer, ways, exact=1e-6):
    """Whichever of the ways, by world size, has saved it: each goes on as the one that saved it does."""
    expected = {}
    for world, here in ways.items():
        for how, found in run(run_processes, sharded_job.begin, str(folder), optimizer, here, world=world)[
            0
        ].items():
            expected[f"{how}-{world}"] = found
    for world, here in ways.items():
        for by_pair in run(
            run_processes, sharded_job.go_on, str(folder), optimizer, here, list(expected), world=world
        ):
            for (saved, how), found in by_pair.items():
                assert found == pytest.approx(expected[saved], abs=exact), f"{saved} -> {how}-{world}"


@pytest.mark.full
@NEEDS_MEANS
def test_however_it_is_held_it_goes_on_in_any_other_way(tmp_path, run_processes):
    ways = {1: ["whole", "flat"], 2: ["whole", "shards", "tensor", "stages"], 3: ["shards", "flat", "stages"]}
    check_all_pairs(run_processes, tmp_path, "SGD", ways)


@NEEDS_MEANS
@pytest.mark.parametrize(
    ("optimizer", "exact"), [("AdamW", 1e-6), pytest.param("Muon", 1e-3, marks=pytest.mark.full)]
)  # Muon rounds to bf16
def test_optimizers_of_dtensors(tmp_path, optimizer, exact, run_processes):
    check_all_pairs(run_processes, tmp_path, optimizer, {1: ["whole"], 2: ["shards"], 3: ["shards"]}, exact)


def test_a_mesh_of_two_dimensions(tmp_path, run_processes):
    assert all(all(found) for found in run(run_processes, sharded_job.two_dimensions, world=4))


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes_of_views(shape, data):
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    end = data.draw(st.integers(start, total))
    storage = torch.arange(start, end)
    leaf = flat_range(storage, shape, start)
    found = torch.full(shape, -1)
    for offset, part in leaf.shards:
        box = tuple(slice(at, at + size) for at, size in zip(offset, part.shape, strict=True))
        assert (found[box] == -1).all(), "boxes overlap"
        found[box] = part
        assert part.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    expected = torch.full((total,), -1)
    expected[start:end] = storage
    assert torch.equal(found.flatten(), expected)
    assert len(leaf.shards) <= max(1, 2 * len(shape) - 1)
