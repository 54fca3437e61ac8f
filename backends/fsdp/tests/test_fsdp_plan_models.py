"""Models of transformers, split by the plans that they bring, train as in one process."""

from __future__ import annotations

from functools import cache

import grid_job
import plan_job
import pytest
import torch

pytestmark = pytest.mark.needs("transformers")
CLIP = 0.1
FEW = ["Phi3", "Mixtral", "DeepseekV3"]
REST = [name for name in (*plan_job.DENSE, *plan_job.MIXTURES, *plan_job.MORE) if name not in FEW]


@cache
def plain(name):
    return plan_job.all_of("plain", [name], CLIP)[name]


def assert_as_plain(found):
    for rank in found:
        for name, (losses, norms, weights, _) in rank.items():
            expected = plain(name)
            assert losses == pytest.approx(expected[0], abs=1e-5), name
            assert norms == pytest.approx(expected[1], rel=1e-4), name
            assert weights.keys() == expected[2].keys()
            for key, value in expected[2].items():
                torch.testing.assert_close(
                    torch.tensor(weights[key]), torch.tensor(value), rtol=1e-4, atol=1e-5, msg=f"{name} {key}"
                )


def train(run_processes, names, sizes, world=2):
    variables = grid_job.environment(sizes)
    return run_processes(
        plan_job.all_of, "trained", names, CLIP, world=world, environment=variables, timeout=250
    )


@pytest.mark.parametrize(
    "names", [pytest.param(FEW, id="few"), pytest.param(REST, id="rest", marks=pytest.mark.full)]
)
def test_a_plan_of_tensor_parallelism_changes_no_number(names, run_processes):
    assert_as_plain(train(run_processes, names, {"tp": 2}))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["Qwen3Moe"], id="few"),
        pytest.param(["GptOss", "DeepseekV3", "GraniteMoeSWA"], id="rest", marks=pytest.mark.full),
    ],
)
def test_a_plan_of_experts_names_the_modules_to_spread(names, run_processes):
    found = train(run_processes, names, {"ep": 2})
    assert_as_plain(found)
    for rank in found:
        for _, _, _, shapes in rank.values():
            assert {shape[0] for key, shape in shapes.items() if key.endswith("experts.down_proj")} == {2}


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"tp": 2, "ep": 2}], ids=["sharded", "spread"])
def test_plans_go_with_other_dimensions(sizes, run_processes):
    assert_as_plain(train(run_processes, ["Mixtral", "DeepseekV3"], sizes, world=4))


@pytest.mark.full
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}, {}], ids=["split", "sharded", "one"])
def test_packed_weights_are_saved_and_go_on_with_other_parts(sizes, tmp_path, run_processes):
    folder = str(tmp_path / "state")
    before = run_processes(plan_job.continued, {"tp": 2}, folder, True, world=2)
    after = run_processes(plan_job.continued, sizes, folder, False, world=2 if sizes else 1)
    for losses, weights in (*before, *after):
        assert losses == pytest.approx(before[0][0], abs=1e-5)
        for key, value in before[0][1].items():
            torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5)
