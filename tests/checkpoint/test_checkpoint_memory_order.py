"""The parts of a flattened tensor, whatever order its memory has, and whether it has elements at all."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning import plan

from accel_core import CheckpointError, Leaf, flat_range
from accel_core.storage.layout import Layout
from accel_core.storage.leaves import declare


@given(st.data())
def test_ranges_of_a_tensor_flattened_in_the_order_of_its_memory_make_up_the_tensor(data):
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    size = torch.Size(shape).numel()
    memory = torch.arange(float(size))
    back = [list(order).index(dim) for dim in range(len(shape))]
    tensor = memory.view([shape[dim] for dim in order]).permute(back)
    assert list(tensor.shape) == shape
    cut = data.draw(st.integers(0, size))
    found = torch.full(shape, -1.0)
    for start, end in ((0, cut), (cut, size)):
        leaf = flat_range(memory[start:end].clone(), shape, start, strides=tensor.stride())
        for offset, part in leaf.shards:
            found[tuple(slice(at, at + width) for at, width in zip(offset, part.shape, strict=True))] = part
    assert torch.equal(found, tensor)


def test_the_parts_are_views_of_the_live_storage():
    memory = torch.zeros(6)
    ((_, part),) = flat_range(memory, (2, 3), 0, strides=(1, 2)).shards
    part.copy_(torch.tensor([[0.0, 1, 2], [3, 4, 5]]))
    assert memory.tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("strides", [(6, 1), (0, 1), (1, 1)])
def test_a_tensor_whose_memory_is_not_dense_has_no_flat_range(strides):
    with pytest.raises(CheckpointError, match="gaps, or elements that share"):
        flat_range(torch.zeros(6), (2, 3), 0, strides=strides)


def test_a_tensor_without_elements_is_one_box_that_any_rank_may_hold():
    leaves = [flat_range(torch.empty(0), (0, 3), 0) for _ in range(2)]
    writes = plan([{("unit0", "model/w"): declare(leaf, any_replica_may_write=True)} for leaf in leaves])
    assert [len(each) for each in writes] == [1, 0]


def test_a_tensor_without_elements_that_no_rank_holds_is_refused():
    leaf = flat_range(torch.empty(0), (0, 3), 0)
    nowhere = declare(leaf, any_replica_may_write=True)._replace(boxes=(), dtypes=())
    with pytest.raises(CheckpointError, match="held by no rank"):
        plan([{("unit0", "model/w"): nowhere}])


@pytest.mark.parametrize("order", [1, -1])
def test_a_tensor_without_elements_in_several_boxes_is_indexed_by_all_of_them(order):
    """One of them may have the shape of the whole tensor."""
    shards = (((0, 0), torch.empty(4, 0)), ((4, 0), torch.empty(0, 0)))[::order]
    key, leaf = ("unit0", "model/w"), Leaf(kind="like_param", global_shape=(4, 0), shards=shards)
    declared = {key: declare(leaf, any_replica_may_write=True)}
    layout = Layout.of("", declared, plan([declared])[0], {key: leaf})
    (_, boxes) = json.loads(b"{%b}" % layout.index)["tensors"]["unit0"]["model/w"]
    assert [(offset, shape) for offset, shape, _ in boxes] == [([0, 0], [4, 0]), ([4, 0], [0, 0])][::order]
