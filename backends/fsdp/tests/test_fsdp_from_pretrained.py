"""Models that transformers shards as it loads them: trained, saved and resumed as in one process."""

from __future__ import annotations

import from_pretrained_job as job
import pytest
import torch

pytest.importorskip("transformers")

TP = {"ACCEL__PARALLELISM__TP": "2"}
TWO = {
    "fsdp": ({}, {"fsdp_size": 2}),
    "tp": (TP, {"tp_size": 2}),
}
FOUR = {
    "fsdp x tp": (TP, {"fsdp_size": 2, "tp_size": 2}),
    "hsdp": ({}, {"dp_replicate_size": 2, "fsdp_size": 2}),
}
EXPERTS = {
    "fsdp x tp x ep": (TP, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    "fsdp x ep": ({}, {"fsdp_size": 4, "ep_size": 2}),
}
OWN = {"own": ({}, None)}
CASES = [("llama", 2, TWO), ("tied", 2, TWO), ("mixtral", 2, TWO)]
CASES += [("llama", 4, FOUR), ("tied", 4, FOUR), ("mixtral", 4, FOUR | EXPERTS)]
NAMES = [f"{kind}-{world}" for kind, world, _ in CASES]


@pytest.fixture
def model(tmp_path):
    """A function that writes a model as the hub has it."""

    def write(kind):
        return job.write_model(tmp_path / kind, kind)

    return write


def check(found, losses, norms, weights=None):
    assert found[0] == pytest.approx(losses, rel=1e-6)  # transformers computes them in float32
    assert found[1] == pytest.approx(norms, rel=1e-5)  # routers too
    for name, value in (weights or {}).items():
        torch.testing.assert_close(found[2][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [2, job.STEPS])
@pytest.mark.parametrize(("kind", "world", "cases"), CASES, ids=NAMES)
@pytest.mark.by_default("llama-2-2", "mixtral-4-2")
def test_it_trains_as_in_one_process(kind, world, cases, steps, model, run_processes):
    folder = model(kind)
    expected = job.plain(folder, steps)
    for mine in run_processes(job.trained, cases, folder, steps, world=world):
        for found in mine.values():
            check(found, *expected)


@pytest.mark.full
def test_experts_on_each_rank_train_as_in_one_process(model, run_processes):
    # torch divides twice where one rank has an expert and gradients are float64, so in float32.
    folder = model("mixtral")
    losses, norms, _ = job.plain(folder, 5)
    cases = {"ep": ({"ACCEL_TEST_DTYPE": "float32"}, {"fsdp_size": 2, "ep_size": 2})}
    for mine in run_processes(job.trained, cases, folder, 5, world=2):
        assert mine["ep"][0] == pytest.approx(losses, rel=1e-4)
        assert mine["ep"][1] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.by_default("2-mixtral")
def test_its_state_goes_on_in_any_layout_and_in_one_process(kind, world, model, tmp_path, run_processes):
    folder, states, begun, more = model(kind), str(tmp_path / "states"), 2, 2
    losses, norms, _ = job.plain(folder, begun + more)
    cases = TWO if world == 2 else FOUR | (EXPERTS if kind == "mixtral" else {})
    run_processes(job.trained, cases, folder, begun, states, world=world)
    for others, resumed in ((1, OWN), (2, TWO | OWN), *([(4, FOUR)] if world == 4 else [])):
        for mine in run_processes(job.resumed, resumed, folder, more, states, world=others):
            assert len(mine) == len(cases)
            for found in (one for by_case in mine.values() for one in by_case.values()):
                check(found, losses[begun * job.WINDOW :], norms[begun:])


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral"])
@pytest.mark.by_default("mixtral")
def test_its_weights_are_exported_as_the_hub_has_them(kind, model, tmp_path, run_processes):
    folder, target = model(kind), tmp_path / "exported"
    for world, cases in ((2, TWO), (4, FOUR)):
        found = run_processes(job.exported, cases, folder, str(target), world=world)[0]
        for name, weights in found.items():
            again = job.load(str(target / name)).state_dict()
            assert again.keys() == weights.keys() or kind == "tied"
            assert all(torch.equal(again[key], value) for key, value in weights.items())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.by_default("2")
def test_gradients_that_transformers_sums_in_each_backward_are_right_or_refused(world, model, run_processes):
    folder = model("qwen3")
    if world == 2:
        for said in run_processes(job.refused, folder, TP, {"tp_size": 2}, world=2):
            assert "let parallelism.tp split it" in said
        return
    cases = {"fsdp x tp": FOUR["fsdp x tp"]}
    for mine in run_processes(job.trained, cases, folder, 3, world=4):
        check(mine["fsdp x tp"], *job.plain(folder, 3))


REFUSED = {
    "layers that are split": ({}, {"fsdp_size": 2, "tp_size": 2}, "set parallelism.tp: 2"),
    "split and nothing else": ({}, {"tp_size": 4}, "set parallelism.tp: 4"),
    "another tp": (TP, {"fsdp_size": 4}, "make both alike"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.by_default("layers that are split")
def test_a_layout_that_contradicts_the_run_is_refused_with_the_setting(name, model, run_processes):
    settings, layout, remedy = REFUSED[name]
    for said in run_processes(job.refused, model("llama"), settings, layout, world=4):
        assert remedy in said


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft asks for it
def test_adapters_of_peft_are_trained_saved_resumed_and_merged(model, tmp_path, run_processes):
    peft = pytest.importorskip("peft")
    folder, target, begun, more = model("llama"), tmp_path / "adapters", 3, 2
    losses, norms, weights = job.plain(folder, begun, job.with_adapters)
    for mine in run_processes(job.adapted, TWO, folder, begun, str(target), world=2):
        for found in mine.values():
            check(found, losses, norms)
    for name in TWO:
        loaded = peft.PeftModel.from_pretrained(job.load(folder), target / name)
        for key, value in loaded.state_dict().items():
            torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-6)
        merged = loaded.merge_and_unload()
        assert not any("lora" in key for key in merged.state_dict())
    losses, norms, _ = job.plain(folder, begun + more, job.with_adapters)
    for world, cases in ((1, OWN), (2, TWO)):
        for mine in run_processes(job.adapted_again, cases, folder, more, str(target), world=world):
            for found in (one for by_case in mine.values() for one in by_case.values()):
                check(found, losses[begun * job.WINDOW :], norms[begun:])
