"""Pictures of processes show each rank where it is, and a schedule as torch runs it."""

from __future__ import annotations

import re

import pytest

from accel_monitor.columns import Curve, Point
from accel_monitor.curve import braille, over_steps, spark
from accel_monitor.pictures import gpipe, mesh_picture, one_f_one_b, schedule_picture


def test_ranks_lie_in_the_mesh_as_torch_counts_them():
    picture = mesh_picture({"processes": 8, "mesh": {"dp": 2, "pp": 2, "tp": 2}})

    assert re.findall(r'class="rank">(\d+)<', picture) == [str(rank) for rank in range(8)]
    assert re.findall(r"<span>(\w+ ?\d?)</span>", picture)[:4] == ["dp 0", "pp 0", "tp", "pp 1"]
    assert "dp 2 × pp 2 × tp 2" in picture


def test_without_a_mesh_processes_are_a_row_and_one_alone_is_nothing():
    assert re.findall(r'class="rank">(\d+)<', mesh_picture({"processes": 3, "mesh": None})) == ["0", "1", "2"]
    assert mesh_picture({"processes": 1, "mesh": None}) == ""


def test_a_large_mesh_is_named_and_not_drawn():
    assert mesh_picture({"processes": 4096, "mesh": {"dp": 4096}}) == "<p>dp 4096</p>"


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_1f1b_has_torchs_order_on_each_stage(stages, count):
    from torch.distributed.pipelining.schedules import _ComputationType, _get_1f1b_rank_ops

    words = {_ComputationType.FORWARD: "F", _ComputationType.FULL_BACKWARD: "B"}
    rows = one_f_one_b(stages, count)
    for stage, row in enumerate(rows):
        ahead = min(stages - stage, count)
        operations = _get_1f1b_rank_ops(
            1, stages, ahead - 1, count - (ahead - 1), ahead - 1, stage, lambda _: 0, lambda _: 0
        )
        theirs = [
            f"{words[action.computation_type]}{action.microbatch_index}" for action in operations if action
        ]
        assert [task for task in row if task] == theirs


def test_a_task_waits_for_what_it_needs():
    rows = gpipe(2, 2)

    assert rows == [["F0", "F1", "", "", "B0", "B1"], ["", "F0", "F1", "B0", "B1", ""]]


def test_a_record_with_a_pipeline_has_its_schedule():
    options = [
        ["parallelism.pp", 2, ""],
        ["fsdp.pp_schedule", "1F1B", ""],
        ["gradient_accumulation_steps", 4, ""],
    ]

    assert schedule_picture({"config": options}).count('class="F"') == 8
    assert "not drawn" in schedule_picture({"config": [*options, ["fsdp.pp_schedule", "LoopedBFS", ""]]})
    assert schedule_picture({"config": [["parallelism.pp", 1, ""], *options[1:]]}) == ""


def test_a_curve_falls_from_the_upper_left_to_the_lower_right():
    top, bottom = braille([3.0, 2.0, 1.0, 0.0], 2)

    assert (top[0] != "\u2800", bottom[1] != "\u2800") == (True, True)
    assert bottom[0] == "\u2800"


def points(*values, steps=None):
    curve = Curve()
    for step, value in zip(steps or range(len(values)), values, strict=True):
        curve.add(Point(step, step, 0.0, value))
    return curve


def test_small_curves_take_any_values():
    assert spark(points(), 5) == ""
    assert spark(points(1.0, 1.0), 5) == "▁▁▁▁▁"
    assert spark(points(0.0, float("nan"), 1.0), 3) == "▁▅█"
    assert len(spark(points(*range(1000)), 40)) == 40
    assert braille([], 1) == [""]
    assert {len(line) for line in braille([1.0] * 7, 3)} == {4}


def test_a_curve_lies_over_the_steps_and_not_over_the_count_of_its_values():
    assert over_steps(points(10.0, 0.0, 0.0, steps=[0, 10, 100]), 11) == [10.0] + [0.0] * 10
    assert over_steps(points(0.0, 4.0, steps=[1, 9]), 5) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_steps_that_each_epoch_counts_anew_are_drawn_in_the_order_of_training():
    curve = Curve()
    for done, (own, value) in enumerate([(1, 4.0), (2, 3.0), (1, 2.0), (2, 1.0)]):
        curve.add(Point(done, own, 0.0, value))

    assert over_steps(curve, 4) == [4.0, 3.0, 2.0, 1.0]
