"""State is saved in parts, by the names of the user's model, and goes on in any stack and world."""

from __future__ import annotations

from typing import Any

import deepspeed_state_jobs as jobs
import pytest
import torch

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(600)

OFFLOAD = {"device": "cpu"}
JSON: dict[str, Any] = {
    "zero0": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2-odd": {
        "zero_optimization": {"stage": 2, "contiguous_gradients": False, "round_robin_gradients": True}
    },
    "zero2-offload": {"zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "zero3-small": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20}
    },
    "zero3-nodes": {
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 2,
            "stage3_param_persistence_threshold": 0,
        }
    },
    "zero3-offload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}
    },
}
BF16 = {"bf16": {"enabled": True}}
STAGES = {name: JSON[name] for name in ("zero0", "zero1", "zero2", "zero3-small")}


def run(run_processes, job: Any, *args: Any, world: int = 2, **options: Any) -> list[Any]:
    return run_processes(_call, job.__name__, args, options, world=world, timeout=500)


def _call(name: str, args: Any, options: Any) -> Any:
    return getattr(jobs, name)(*args, **options)


def saved_and_resumed(
    run_processes, folder: Any, ways: dict[str, Any], **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each way in a world of two, and without DeepSpeed in one: what followed each, and each pair."""
    folders = [str(folder / "two"), str(folder / "one")]
    two = run(run_processes, jobs.saves, folders[0], ways, **more)[0]
    one = run(run_processes, jobs.saves, folders[1], {"native": None}, world=1, **more)[0]
    found = run(run_processes, jobs.resumes, folders[0], list(ways), ways, **more)[0]
    found |= run(run_processes, jobs.resumes, folders[1], ["native"], ways, **more)[0]
    found |= run(run_processes, jobs.resumes, folders[0], list(ways), {"native": None}, world=1, **more)[0]
    return {**two, **one}, found


@pytest.mark.parametrize("algorithm", ["AdamW", pytest.param("SGD", marks=pytest.mark.full)])
def test_any_stage_goes_on_from_any_other_and_from_one_process_without(
    tmp_path: Any, algorithm: str, run_processes
) -> None:
    ways = STAGES if algorithm == "AdamW" else {name: JSON[name] for name in ("zero2", "zero3")}

    expected, found = saved_and_resumed(run_processes, tmp_path, ways, algorithm=algorithm)

    assert len(found) == len(ways) * (len(ways) + 2)
    assert {
        pair: losses for pair, losses in found.items() if losses != expected[pair.partition(" ")[0]]
    } == {}


@pytest.mark.full
def test_offloaded_and_oddly_laid_out_state_goes_on(tmp_path: Any, run_processes) -> None:
    ways = {name: how for name, how in JSON.items() if name not in STAGES}

    expected, found = saved_and_resumed(run_processes, tmp_path, ways)

    assert {
        pair: losses for pair, losses in found.items() if losses != expected[pair.partition(" ")[0]]
    } == {}


@pytest.mark.full
def test_masters_of_16_bit_weights_go_on_from_stage_to_stage(tmp_path: Any, run_processes) -> None:
    ways = {name: {**JSON[name], **BF16} for name in ("zero0", "zero1", "zero3-small")}
    ways["fp32 gradients"] = {**ways["zero1"], "data_types": {"grad_accum_dtype": "fp32"}}

    two = run(run_processes, jobs.saves, str(tmp_path), ways)[0]
    one = run(run_processes, jobs.resumes, str(tmp_path), list(ways), ways, world=1)[0]

    assert {pair: losses for pair, losses in one.items() if losses != two[pair.partition(" ->")[0]]} == {}


@pytest.mark.needs("accel-ddp")
def test_ddp_goes_on_from_zero_and_back(tmp_path: Any, run_processes) -> None:
    ways = {name: JSON[name] for name in ("zero1", "zero3")}
    expected = run(run_processes, jobs.saves, str(tmp_path), ways)[0]
    expected |= run(run_processes, jobs.saves, str(tmp_path), {"ddp": None}, strategy="ddp")[0]

    found = run(run_processes, jobs.resumes, str(tmp_path), list(ways), {"ddp": None}, strategy="ddp")[0]
    found |= run(run_processes, jobs.resumes, str(tmp_path), ["ddp"], ways)[0]

    assert {
        pair: losses for pair, losses in found.items() if losses != expected[pair.partition(" ")[0]]
    } == {}


@pytest.mark.needs("accel-fsdp")
def test_fsdp_goes_on_from_zero_and_back(tmp_path: Any, run_processes) -> None:
    ways = {name: JSON[name] for name in ("zero2", "zero3")}
    expected = run(run_processes, jobs.saves, str(tmp_path), ways)[0]
    expected |= run(run_processes, jobs.saves, str(tmp_path), {"fsdp": None}, strategy="fsdp")[0]

    found = run(run_processes, jobs.resumes, str(tmp_path), list(ways), {"fsdp": None}, strategy="fsdp")[0]
    found |= run(run_processes, jobs.resumes, str(tmp_path), ["fsdp"], ways)[0]

    for pair, losses in found.items():
        assert losses == pytest.approx(expected[pair.partition(" ")[0]], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3-small"])
def test_no_rank_offers_what_another_has(name: str, run_processes) -> None:
    first, second = run(run_processes, jobs.names_in_boxes, JSON[name])

    trained = {"first.weight": 35, "first.bias": 5, "there.weight": 25, "last.weight": 15, "last.bias": 3}
    assert {key: first[key] + second[key] for key in trained} == trained


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero2", "zero3-small"])
def test_a_save_that_does_not_wait_holds_what_was_there(tmp_path: Any, name: str, run_processes) -> None:
    for found, expected in run(
        run_processes, jobs.saves_async, {**JSON[name], **BF16}, str(tmp_path / "state")
    ):
        assert found == expected


@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "zero3-small"])
@pytest.mark.by_default("zero1", "zero3")
def test_weights_are_whole_in_every_form(tmp_path: Any, name: str, run_processes) -> None:
    for found in run(run_processes, jobs.weights_of, {**JSON[name], **BF16}, str(tmp_path)):
        live, masters = found["live"], found["float32"]
        trained = {key for key in live if key not in ("seen", "fixed.weight", "fixed.bias")}
        assert {live[key].dtype for key in trained} == {torch.bfloat16}
        assert all(torch.equal(masters[key].bfloat16(), live[key]) for key in trained)
        assert any(not torch.equal(masters[key], live[key].float()) for key in trained), (
            "masters have more digits"
        )
        for form in ("saved", "full", "after a forward"):
            assert all(torch.equal(found[form][key], live[key]) for key in trained), form


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero3", "zero3-small"])
def test_what_is_written_into_full_parameters_is_kept_and_the_rest_not_rounded(
    name: str, run_processes
) -> None:
    first, second = run(run_processes, jobs.writes, {**JSON[name], **BF16})

    before, after, losses = first
    assert after["last.bias"].tolist() == [0.5, 0.5, 0.5]
    assert [key for key in before if key != "last.bias" and not torch.equal(before[key], after[key])] == []
    assert losses == second[2]


@pytest.mark.full
def test_counters_of_the_engine_go_on(tmp_path: Any, run_processes) -> None:
    for saved, loaded in run(run_processes, jobs.counts, JSON["zero2"], str(tmp_path / "state")):
        assert saved == loaded == jobs.STEPS


MOVING = {"fp16": {"enabled": True, "initial_scale_power": 6}}
FIXED = {"fp16": {"enabled": True, "loss_scale": 16}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "loaded", "expected"),
    [
        pytest.param(MOVING, {"fp16": {"enabled": True}}, 64, id="as saved"),
        pytest.param(MOVING, FIXED, 16, id="fixed by the config"),
        pytest.param(FIXED, MOVING, 64, id="no longer fixed"),
        pytest.param(MOVING, BF16, 1, id="from fp16 to bf16"),
        pytest.param(MOVING, {}, 1, id="from fp16 to float32"),
        pytest.param(BF16, MOVING, 64, id="from bf16 to fp16"),
    ],
)
def test_a_loss_scale_goes_on_where_it_moves_and_else_is_that_of_the_config(
    tmp_path: Any, saved: Any, loaded: Any, expected: float, run_processes
) -> None:
    ((before, new, after),) = run(run_processes, jobs.scales, saved, loaded, str(tmp_path / "state"), world=1)

    assert after[0] == expected
    assert after[1] == pytest.approx(before[1], rel=0.02)
    assert after[1] == pytest.approx(new[1], rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_parameter_without_state_begins_with_no_moments_and_is_named(
    tmp_path: Any, name: str, run_processes
) -> None:
    run(run_processes, jobs.mixes, None, str(tmp_path / "state"), save=True, world=1)

    (found,) = run(run_processes, jobs.mixes, JSON[name], str(tmp_path / "state"), save=False, world=1)

    said, moments, steps, untouched = found
    assert "no optimizer state of last.bias; DeepSpeed steps parameters together" in said
    assert (moments, steps, untouched) == (0.0, [jobs.STEPS], False)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_steps_that_differ_are_refused_before_anything_is_loaded(
    tmp_path: Any, name: str, run_processes
) -> None:
    run(run_processes, jobs.mixes, None, str(tmp_path / "state"), save=True, late=True, world=1)

    (found,) = run(
        run_processes, jobs.mixes, JSON[name], str(tmp_path / "state"), save=False, late=True, world=1
    )

    said, moments, steps, untouched = found
    assert "step of first.bias is 4, of last.bias 1, and they are stepped as one" in said
    assert "nothing was loaded" in said
    assert moments > 0
    assert (steps, untouched) == ([1.0], True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-small"])
def test_state_of_what_is_frozen_since_is_left_out_and_named(tmp_path: Any, name: str, run_processes) -> None:
    run(run_processes, jobs.saves, str(tmp_path), {"native": None}, world=1)
    ((_, expected),) = run(run_processes, jobs.freezes, None, str(tmp_path / "native"), world=1)

    for said, losses in run(run_processes, jobs.freezes, JSON[name], str(tmp_path / "native")):
        assert "the checkpoint has optimizer state of first.bias, frozen here" in said
        assert losses == expected


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero3", "zero3-small"])
@pytest.mark.by_default("zero0-False", "zero3-False")
def test_a_run_that_has_resumed_saves_what_goes_on(
    tmp_path: Any, name: str, between: bool, run_processes
) -> None:
    for expected, found, steps in run(run_processes, jobs.again, JSON[name], str(tmp_path), between=between):
        assert found == expected
        assert steps == {2 * jobs.STEPS}


@pytest.mark.full
def test_what_an_optimizer_keeps_of_no_parameter_is_refused_by_name(tmp_path: Any, run_processes) -> None:
    (told,) = run(run_processes, jobs.saves_what_belongs_to_no_parameter, str(tmp_path / "here"), world=1)
    assert "Counting keeps 'count', which belongs to no parameter" in told


@pytest.mark.full
@pytest.mark.parametrize("adamw", [True, False])
def test_deepspeeds_adam_for_cpus_is_saved_as_torchs(adamw: bool, run_processes) -> None:
    ((algorithm, group),) = run_processes(jobs.says, adamw, world=1)
    assert algorithm == ("AdamW" if adamw else "Adam")
    assert group["decoupled_weight_decay"] is adamw
