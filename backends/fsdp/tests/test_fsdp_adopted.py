"""Models that the program has sharded by `fully_shard` before `prepare`, as torch's tutorial does."""

from __future__ import annotations

import adopted_job
import pytest
import torch

FSDP = {"ACCEL__STRATEGY": "fsdp"}


def same(found, expected):
    losses, norms, weights = expected
    for mine in found:
        assert mine[0] == pytest.approx(losses, rel=1e-9)
        assert mine[1] == pytest.approx(norms, rel=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(mine[2][name], value, rtol=0, atol=1e-9)


def test_a_model_sharded_by_hand_trains_as_in_one_process(run_processes):
    found = run_processes(adopted_job.adopted, FSDP, world=2)
    same(found, adopted_job.plain())
    assert [mine[3] for mine in found] == [3, 3]
    assert "was sharded before prepare, in 3 group(s) over 2 rank(s)" in found[0][5]


def test_adapters_beside_sharded_weights_are_averaged_and_count_once_in_the_norm(run_processes):
    found = run_processes(adopted_job.adopted, FSDP, True, world=2)
    same(found, adopted_job.plain(adapted=True))
    assert [mine[4] for mine in found] == [None, None]


@pytest.mark.full
def test_adapters_are_averaged_after_a_backward_that_failed(run_processes):
    found = run_processes(adopted_job.adopted, FSDP, True, {}, True, world=2)
    same(found, adopted_job.plain(adapted=True))


@pytest.mark.full
def test_replicas_of_shards_need_no_setting(run_processes):
    same(run_processes(adopted_job.adopted, FSDP, False, {"replicate": 2}, world=4), adopted_job.plain())


@pytest.mark.full
def test_its_state_goes_on_in_one_process_and_however_it_is_sharded(tmp_path, run_processes):
    losses, norms, _ = adopted_job.plain()
    folder = str(tmp_path / "state")
    run_processes(adopted_job.begun, FSDP, {}, folder, world=2)
    for world, environment, options in (
        (1, {}, None),
        (2, FSDP, None),
        (2, FSDP, {"reshard_after_forward": False}),
        (4, FSDP, {"replicate": 2}),
    ):
        for mine in run_processes(adopted_job.resumed, environment, options, folder, world=world):
            assert mine[0] == pytest.approx(losses[len(losses) // 2 :], rel=1e-9)
            assert mine[1] == pytest.approx(norms[len(norms) // 2 :], rel=1e-9)


REFUSED = {
    "fsdp 1": (FSDP | {"ACCEL__FSDP__FSDP_VERSION": "1"}, "", "set fsdp.fsdp_version: 2"),
    "ignored modules": (
        FSDP | {"ACCEL__FSDP__IGNORED_MODULES": "norm"},
        "",
        "leave fsdp.ignored_modules out",
    ),
    "offload": (FSDP | {"ACCEL__FSDP__CPU_OFFLOAD": "true"}, "", "leave fsdp.cpu_offload out"),
    "twice": (FSDP, "twice", "was sharded by an earlier prepare"),
    "meta": (FSDP, "meta", "is on the meta device"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_contradicts_the_run_is_refused_with_the_setting(name, run_processes):
    environment, kind, remedy = REFUSED[name]
    for said in run_processes(adopted_job.refused, environment, kind, world=2):
        assert remedy in said


@pytest.mark.parametrize(
    ("environment", "kind", "remedy"),
    [
        (FSDP, "half of the ranks", "set parallelism.tp: 2"),
        (FSDP | {"ACCEL__PARALLELISM__TP": "2"}, "", "make both alike"),
        (FSDP | {"ACCEL__PARALLELISM__DP_REPLICATE": "2"}, "", "set parallelism.dp_replicate: 1"),
    ],
)
def test_ranks_that_do_not_agree_are_shown(environment, kind, remedy, run_processes):
    for said in run_processes(adopted_job.refused, environment, kind, world=4):
        assert remedy in said
