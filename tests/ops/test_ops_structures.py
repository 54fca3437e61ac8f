"""Collectives over any nesting give what a plain loop over its tensors gives, in the types they had."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from rank_processes import ranks

from accel_core import ops
from accel_core.distributed.nested import Description, describe, leaves, rebuild

pytestmark = pytest.mark.needs("accel-ddp")


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Output:
    logits: Any
    hidden: Any = None


@dataclass(frozen=True)
class Sample:
    pixels: Any
    label: Any


class Encoding(UserDict):
    pass


class Stack(list):
    pass


def keyed(make):
    return lambda children: st.dictionaries(st.sampled_from(["a", "b", 3]), children, max_size=3).map(make)


def listed(make):
    return lambda children: st.lists(children, max_size=3).map(make)


def paired(make):
    return lambda children: st.tuples(children, children).map(lambda pair: make(*pair))


CONTAINERS = [
    *map(keyed, (dict, OrderedDict, MappingProxyType, Encoding, lambda items: defaultdict(list, items))),
    *map(listed, (list, tuple, Stack)),
    *map(paired, (Point, Output, Sample)),
]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LEAVES = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    SHAPES,
    st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool]),
)
STRUCTURES = st.recursive(
    LEAVES, lambda children: st.one_of([container(children) for container in CONTAINERS]), max_leaves=6
)


def of_rank(structure, rank):
    """The structure with numbers that tell leaves and ranks apart."""
    tensors, _ = leaves(structure, "test")
    return rebuild(
        structure, [torch.full_like(each, rank + 2 * number) for number, each in enumerate(tensors)]
    )


def alike(found, expected, like):
    mine, shape = leaves(found, "test")
    return shape == leaves(like, "test")[1] and all(
        one.dtype is other.dtype and torch.equal(one, other)
        for one, other in zip(mine, expected, strict=True)
    )


def compare_with_a_loop(accelerator, structures):
    size, rank, wrong = accelerator.num_processes, accelerator.process_index, []
    for structure in structures:
        every = [leaves(of_rank(structure, each), "test")[0] for each in range(size)]
        columns = list(zip(*every, strict=True))
        gathered = [torch.cat([each.reshape(each.shape or 1) for each in column]) for column in columns]
        counted = {torch.bool: torch.int64}
        sums = [torch.stack(column).sum(0).to(counted.get(d := column[0].dtype, d)) for column in columns]
        mine = of_rank(structure, rank)
        if not alike(ops.gather(mine), gathered, structure):
            wrong.append(("gather", describe(structure)))
        if not alike(ops.reduce(mine, "sum"), sums, structure):
            wrong.append(("reduce", describe(structure)))
        if not alike(ops.pad_across_processes(mine), every[rank], structure):
            wrong.append(("pad", describe(structure)))
        if not alike(ops.broadcast(mine, size - 1), every[-1], structure):
            wrong.append(("broadcast", describe(structure)))
    return wrong


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(structures=st.lists(STRUCTURES, min_size=30, max_size=30))
def test_any_structure_is_gathered_reduced_padded_and_broadcast_as_by_a_loop(structures, run_processes):
    # MappingProxyType does not pickle, so processes get what they can rebuild it from.
    plain = [
        structure
        for structure in structures
        if Description("mappingproxy") not in describe(structure).values()
    ]
    assert ranks(run_processes, compare_with_a_loop, plain, world=2) == [[]] * 2


@settings(max_examples=100, deadline=None)
@given(STRUCTURES)
def test_any_structure_is_taken_apart_and_put_together(structure):
    tensors, shape = leaves(structure, "test")
    changed = rebuild(structure, [tensor + 1 for tensor in tensors])

    assert leaves(changed, "test")[1] == shape
    assert type(changed) is type(structure)
    assert describe(changed).keys() == describe(structure).keys()


def test_outputs_and_encodings_of_transformers_keep_their_types():
    transformers = pytest.importorskip("transformers")
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 3))
    batch = transformers.BatchEncoding({"input_ids": torch.ones(1, 2), "labels": torch.tensor([3])})
    tensors, _ = leaves((output, batch), "test")
    doubled, inputs = rebuild((output, batch), [tensor * 2 for tensor in tensors])

    assert (type(doubled), type(inputs)) == (type(output), type(batch))
    assert (doubled.loss, doubled["logits"].sum(), doubled.hidden_states) == (2, 12, None)
    assert [type(each) for each in doubled.to_tuple()] == [torch.Tensor, torch.Tensor]
    assert (inputs["input_ids"].tolist(), inputs.labels.tolist()) == ([[2, 2]], [6])
    assert (output.loss, batch.labels.item()) == (1, 3)
    assert type(ops.send_to_device(batch, "meta")) is type(batch)
    assert ops.send_to_device(output, "meta").logits.device.type == "meta"
