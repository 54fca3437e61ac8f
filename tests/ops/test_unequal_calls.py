"""Ranks of a CPU run that differ in a call: an error on all ranks, at once and without debug mode."""

from __future__ import annotations

import pytest
import torch
from rank_processes import ranks
from torch import nn

from accel_core import CollectiveError, ops
from accel_core.distributed.random import synchronize_rng_state

pytestmark = pytest.mark.needs("accel-ddp")

SMALL, LARGE = 1, 5000
"""Small tensors travel with the header, large ones after it."""


def tensor_call(name, value):
    return {
        "gather": lambda: ops.gather(value),
        "gather_for_metrics": lambda: ops.gather_for_metrics(value),
        "reduce": lambda: ops.reduce(value, "sum"),
        "broadcast": lambda: ops.broadcast(value),
        "broadcast from 1": lambda: ops.broadcast(value, 1),
        "pad_across_processes": lambda: ops.pad_across_processes(value),
    }[name]()


def unequal_inputs(factor):
    """What both ranks pass, by what is unequal."""
    ones = torch.ones(2, 3 * factor)
    return {
        "shape": (torch.ones(2, factor), torch.ones(3, factor)),
        "shape of equal size": (torch.ones(2, 3 * factor), torch.ones(3, 2 * factor)),
        "dimensions": (torch.ones(6 * factor), torch.ones(2, 3 * factor)),
        "dtype": (ones, ones.long()),
        "dtype of equal size": (ones, ones.int()),
        "nesting": ([ones], ones),
        "type of structure": ([ones], (ones,)),
        "keys": ({"a": ones}, {"b": ones}),
        "order of keys": ({"a": ones, "b": ones}, {"b": ones, "a": ones}),
        "number of tensors": ([ones, ones], [ones]),
        "None": ([ones, None], [ones, ones]),
        "split of the same elements": ([torch.ones(2), torch.ones(1)], [torch.ones(1), torch.ones(2)]),
    }


def call_with_unequal_inputs(accelerator, name, factor):
    said = {}
    for case, inputs in unequal_inputs(factor).items():
        try:
            said[case] = tensor_call(name, inputs[accelerator.process_index])
        except CollectiveError as error:
            said[case] = str(error)
        accelerator.wait_for_everyone()  # ranks are in step afterwards
    return said


COMPARED_BY_PADDING = {"dimensions", "nesting", "type of structure", "keys", "order of keys"} | {
    "number of tensors",
    "None",
}


@pytest.mark.parametrize("factor", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "name",
    ["gather", "gather_for_metrics", "reduce", "broadcast", "broadcast from 1", "pad_across_processes"],
)
def test_unequal_inputs_are_an_error_on_both_ranks(name, factor, run_processes):
    said = ranks(run_processes, call_with_unequal_inputs, name, factor)
    # Padding is there for unequal shapes, and sends no elements.
    cases = COMPARED_BY_PADDING if name == "pad_across_processes" else unequal_inputs(1).keys()
    for case in cases:
        assert said[0][case] == said[1][case], case
        assert f"{name.split()[0]}" in said[0][case].splitlines()[0], case
        assert said[0][case].splitlines()[0].endswith("ranks passed different inputs"), case


def calls(accelerator, folder):
    """Each call that all ranks make, by its name in errors."""
    tensor = torch.ones(2)
    return {
        "gather": lambda: ops.gather(tensor),
        "gather_for_metrics": lambda: ops.gather_for_metrics(tensor),
        "reduce (sum)": lambda: ops.reduce(tensor, "sum"),
        "reduce (mean)": lambda: ops.reduce(tensor, "mean"),
        "broadcast from 0": lambda: ops.broadcast(tensor),
        "broadcast from 1": lambda: ops.broadcast(tensor, 1),
        "pad_across_processes": lambda: ops.pad_across_processes(tensor),
        "gather_object": lambda: ops.gather_object([1]),
        "broadcast_object_list from 0": lambda: ops.broadcast_object_list([1]),
        "wait_for_everyone": ops.wait_for_everyone,
        "synchronize_rng_state('torch')": lambda: synchronize_rng_state("torch"),
        "any": lambda: accelerator.any(True),
        "prepare": lambda: accelerator.prepare(nn.Linear(1, 1)),
        "save_state": lambda: accelerator.save_state(f"{folder}/new"),
        "load_state": lambda: accelerator.load_state(f"{folder}/old"),
    }


def call_other_things(accelerator, folder):
    """Return what is said of each pair of calls."""
    accelerator.save_state(f"{folder}/old")
    names, said = list(calls(accelerator, folder)), {}
    for number, first in enumerate(names):
        for second in names[number + 1 :]:
            try:
                calls(accelerator, folder)[second if accelerator.process_index else first]()
            except CollectiveError as error:
                said[first, second] = str(error)
            accelerator.wait_for_everyone()
    return said, [(first, second) for n, first in enumerate(names) for second in names[n + 1 :]]


def test_a_branch_by_rank_is_an_error_that_names_both_calls(tmp_path, run_processes):
    for said, pairs in ranks(run_processes, call_other_things, str(tmp_path)):
        for first, second in pairs:
            finding, of_first, of_second, _ = said[first, second].splitlines()
            assert finding.endswith(": ranks make different calls"), (first, second)
            assert finding.startswith(first.split("_state")[0]), (first, second)
            assert of_first.startswith(f"  rank 0: {first}"), (first, second)
            assert of_second.startswith(f"  rank 1: {second}"), (first, second)


def pass_unequal_objects(accelerator):
    rank = accelerator.process_index
    return (
        ops.gather_object([rank] * (1 + 9000 * rank)) == [0] + [1] * 9001,
        ops.broadcast_object_list(["x" * 90_000, 1] if rank else [None], 1) == ["x" * 90_000, 1],
        ops.gather_for_metrics([{"text": "a" * rank}]),
        ops.pad_across_processes(torch.ones(2 + rank, 1)).flatten().tolist(),
    )


def test_objects_and_lengths_may_differ(run_processes):
    objects = (True, True, [{"text": ""}, {"text": "a"}])
    assert ranks(run_processes, pass_unequal_objects) == [
        (*objects, [1.0, 1.0, 0.0]),
        (*objects, [1.0, 1.0, 1.0]),
    ]
