"""Two processes with parts of a model train it as one process with all of it does."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_problem import (
    Block,
    accelerator,
    batch,
    distance,
    loss_of,
    net,
    optimizer_of,
    plugin,
    steps_of,
    train_ours,
    train_plainly,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from accel_core import AccelError, GradScalerKwargs, ParallelismConfig

VERSIONS = (1, 2)
Trained = tuple[list[float], dict[str, torch.Tensor]]


def assert_same(trained: list[Trained], plain: Trained, tolerance: float = 1e-5) -> None:
    for losses, weights in trained:
        assert losses == pytest.approx(plain[0], abs=tolerance)
        assert distance(weights, plain[1]) < tolerance


@pytest.mark.parametrize("kind", ["mlp", "conv", "gpt"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2-mlp", "1-mlp")
def test_fifty_steps_have_the_losses_of_one_process(version: int, kind: str, run_processes) -> None:
    assert_same(run_processes(train_ours, kind, 50, {"version": version}), train_plainly(kind, 50), 1e-4)


def trainings(kind: str, cases: dict[str, dict[str, Any]]) -> dict[str, Trained]:
    return {name: train_ours(kind, 3, dict(options)) for name, options in cases.items()}


def large(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


SHARED: dict[str, dict[str, Any]] = {
    "the model alone": {"auto_wrap_policy": "no_wrap"},
    "by size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 200},
    "by a callable": {"auto_wrap_policy": large},
    "by a policy of torch": {"auto_wrap_policy": ModuleWrapPolicy({Block})},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "numbered": {"sharding_strategy": 2},
    "forward_prefetch": {"forward_prefetch": True},
    "sync_module_states": {"sync_module_states": True},
    "activation_checkpointing": {"activation_checkpointing": True},
    "checkpointing of a model without blocks": {
        "auto_wrap_policy": "no_wrap",
        "activation_checkpointing": True,
    },
}
OWN: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
        "backward_prefetch": {"backward_prefetch": "BACKWARD_POST"},
        "no prefetch": {"backward_prefetch": "NO_PREFETCH", "limit_all_gathers": False},
    },
    2: {
        "reshard_after_forward": {"reshard_after_forward": True},
        "kept after forward": {"reshard_after_forward": False},
        "cpu_offload": {"cpu_offload": True},
        "offloaded activations": {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    },
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_no_option_changes_what_is_trained(version: int, run_processes) -> None:
    cases = {name: {"version": version, **options} for name, options in (SHARED | OWN[version]).items()}
    plain = train_plainly("mlp", 3)

    for found in run_processes(trainings, "mlp", cases):
        for name, (losses, weights) in found.items():
            assert losses == pytest.approx(plain[0], abs=1e-5), name
            assert distance(weights, plain[1]) < 1e-5, name


def first_losses(version: int, syncs: bool, alike: bool) -> float:
    run = accelerator(plugin("mlp", version, sync_module_states=syncs))
    model = net("mlp", seed=0 if alike else run.process_index)
    model, optimizer = run.prepare(model, optimizer_of(model))
    (loss,) = steps_of(run, model, optimizer, "mlp", range(1))
    run.end_training()
    return loss


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_weights_that_are_equal_already_need_not_be_sent(version: int, run_processes) -> None:
    expected = train_plainly("mlp", 1)[0][0]
    assert run_processes(first_losses, version, False, True) == pytest.approx([expected] * 2, abs=1e-5)
    assert run_processes(first_losses, version, False, False)[0] != pytest.approx(expected, abs=1e-3)


def accumulated(version: int) -> Trained:
    return train_ours("gpt", 4, {"version": version}, gradient_accumulation_steps=2)


@pytest.mark.parametrize("version", VERSIONS)
def test_accumulated_windows_equal_whole_batches(version: int, run_processes) -> None:
    assert_same(run_processes(accumulated, version), train_plainly("gpt", 4))


def collectives_of_a_window(version: int) -> list[set[str]]:
    run = accelerator(plugin("mlp", version), gradient_accumulation_steps=2)
    model = net("mlp")
    model, _optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for _ in range(2):
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu) as profile, run.accumulate(model):
            run.backward(model(torch.ones(2, 6)).sum())
        found.append({event.name for event in profile.events() if event.name.startswith("c10d::")})
    run.end_training()
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_are_reduced_at_the_end_of_a_window_only(version: int, run_processes) -> None:
    for inside, at_its_end in run_processes(collectives_of_a_window, version):
        assert not any("reduce" in name for name in inside)
        assert any("reduce" in name for name in at_its_end)


def parts(version: int) -> tuple[int, int, list[str]]:
    run = accelerator(plugin("gpt", version))
    model = net("gpt")
    whole = sum(p.numel() for p in model.parameters())
    model, _optimizer = run.prepare(model, torch.optim.AdamW(model.parameters()))
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    names = list(run.run.units[0].named_parameters())
    run.end_training()
    return sum(p.numel() for p in held), whole, names


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_each_rank_holds_its_share_under_the_models_own_names(version: int, run_processes) -> None:
    names = [name for name, _ in net("gpt").named_parameters()]
    for held, whole, found in run_processes(parts, version):
        assert whole / 2 * 0.9 < held < whole / 2 * 1.1
        assert found == names


def unwrapped(version: int) -> tuple[bool, bool]:
    run = accelerator(plugin("mlp", version))
    model = net("mlp")
    prepared = run.prepare(model)
    found = (prepared is model, run.unwrap_model(prepared) is model)
    run.end_training()
    return found


def test_version_2_leaves_the_user_the_very_same_model(run_processes) -> None:
    assert run_processes(unwrapped, 2, world=1) == [(True, True)]
    assert run_processes(unwrapped, 1, world=1) == [(False, True)]


def policies(version: int, given: Any, precision: str | None) -> dict[str, Any]:
    run = accelerator(plugin("mlp", version, mixed_precision_policy=given), mixed_precision=precision)
    model = net("mlp")
    seen: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(module.up.weight.dtype))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.backward(model(torch.ones(2, 6)).float().sum())
    optimizer.step()
    run.end_training()
    kept = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    return {"computed in": seen[-1], "kept in": kept}


POLICIES: list[tuple[Any, str | None, torch.dtype]] = [
    (None, None, torch.float32),
    (None, "bf16", torch.bfloat16),
    ("fp32", "bf16", torch.float32),
    ("bf16", None, torch.bfloat16),
    ({"param_dtype": "bf16", "reduce_dtype": "float32"}, None, torch.bfloat16),
]


@pytest.mark.parametrize(("given", "precision", "dtype"), POLICIES)
@pytest.mark.parametrize("version", VERSIONS)
def test_weights_are_gathered_in_the_policys_dtype_and_kept_in_their_own(
    version: int, given: Any, precision: str | None, dtype: torch.dtype, run_processes
) -> None:
    (found,) = run_processes(policies, version, given, precision, world=1)
    assert found == {"computed in": dtype, "kept in": {torch.float32}}


def outputs(version: int, precision: str) -> torch.dtype:
    run = accelerator(plugin("mlp", version), mixed_precision=precision)
    found: torch.dtype = run.prepare(net("mlp"))(torch.ones(2, 6)).dtype
    run.end_training()
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_outputs_are_float32_whatever_the_run_computes_in(version: int, run_processes) -> None:
    for precision in ("bf16", "fp16"):
        assert run_processes(outputs, version, precision) == [torch.float32] * 2


@pytest.mark.full
def test_a_policy_object_of_torch_is_taken_as_it_is(run_processes) -> None:
    for version, make in ((1, MixedPrecision), (2, MixedPrecisionPolicy)):
        (found,) = run_processes(policies, version, make(param_dtype=torch.bfloat16), None, world=1)
        assert found["computed in"] == torch.bfloat16


def overflow_on_one_rank(version: int) -> tuple[list[bool], float]:
    scale = GradScalerKwargs(init_scale=4.0)
    run = accelerator(plugin("mlp", version), mixed_precision="fp16", kwargs_handlers=[scale])
    model = net("mlp")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(3):
        factor = float("inf") if run.process_index == 1 and step == 1 else 1.0
        run.backward(model(torch.ones(2, 6)).float().sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    weights = sum(tensor.sum().item() for tensor in run.get_state_dict(model, rank0_only=False).values())
    run.end_training()
    return skipped, weights


@pytest.mark.parametrize("version", VERSIONS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(version: int, run_processes) -> None:
    first, second = run_processes(overflow_on_one_rank, version)
    assert first == second
    assert first[0] == [False, True, False]


def overflow_of_two_units() -> tuple[list[list[bool]], int]:
    """The first unit steps after each second loss."""
    scale = GradScalerKwargs(init_scale=4.0)
    run = accelerator(
        plugin("mlp", 2, auto_wrap_policy="NO_WRAP"),
        mixed_precision="fp16",
        kwargs_handlers=[scale],
    )
    models = [torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)]
    made = [run.prepare(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in models]
    skipped = []
    for step in range(4):
        factor = float("inf") if run.process_index == 1 and step == 1 else 1.0
        run.backward(made[1][0](made[0][0](torch.ones(2, 6))).float().sum() * factor)
        stepped = [optimizer for _, optimizer in made[1 - step % 2 :]]
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
        skipped.append([optimizer.step_was_skipped for optimizer in stepped])
    scalers = {id(unit.scaler) for unit in run.run.units}
    run.end_training()
    return skipped, len(scalers)


def test_units_share_one_loss_scale_whose_overflows_all_ranks_know(run_processes) -> None:
    first, second = run_processes(overflow_of_two_units)
    assert first == second == ([[False], [True, True], [False], [False, False]], 1)


def overflow_in_one_replica(version: int) -> list[bool]:
    scale = GradScalerKwargs(init_scale=4.0)
    config = plugin("mlp", version)
    run = accelerator(
        config, ParallelismConfig(dp_replicate=2), mixed_precision="fp16", kwargs_handlers=[scale]
    )
    model = net("mlp")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(2):
        run.backward(model(torch.ones(2, 6)).float().sum())
        if run.process_index == 2 and step == 1:  # in what is reduced already, as a bad memory cell would
            gradient: Any = next(p.grad for p in model.parameters() if p.grad is not None and p.grad.numel())
            (gradient.to_local() if version == 2 else gradient).fill_(float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    run.end_training()
    return skipped


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_an_overflow_in_one_replica_skips_the_step_in_all(version: int, run_processes) -> None:
    assert run_processes(overflow_in_one_replica, version, world=4) == [[False, True]] * 4


def ended_by_hand(version: int) -> Any:
    run = accelerator(plugin("mlp", version), gradient_accumulation_steps=3)
    given = net("mlp")
    model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    for step in range(2):
        with run.accumulate(model):
            run.sync_gradients = step == 1
            run.backward(loss_of(model, *[part[run.process_index :: 2] for part in batch("mlp", step)]))
            optimizer.step()
            optimizer.zero_grad()
    return run.get_state_dict(model, rank0_only=False)


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_a_window_that_is_ended_before_its_size_reduces_its_gradients(version: int, run_processes) -> None:
    plain = net("mlp")
    for step in range(2):
        (loss_of(plain, *batch("mlp", step)) / 3).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for weights in run_processes(ended_by_hand, version):
        assert distance(weights, dict(plain.state_dict())) < 1e-6


def stepping_on_what_no_sync_kept(version: int, options: dict[str, Any]) -> str | float:
    """Return the error, or how far the weights are from those of such a step in plain PyTorch."""
    run = accelerator(plugin("mlp", version, **options))
    given, plain = net("mlp"), net("mlp")
    model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    with run.no_sync(model):
        run.backward(loss_of(model, *batch("mlp", 0)))
    try:
        optimizer.step()
    except AccelError as error:
        with pytest.raises(AccelError):  # once more, as long as the gradients are there
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
        return str(error)
    loss_of(plain, *batch("mlp", 0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return distance(run.get_state_dict(model, rank0_only=False), dict(plain.state_dict()))


@pytest.mark.parametrize(("version", "strategy"), [(2, None), (1, None), (1, "NO_SHARD")])
def test_a_step_on_gradients_that_no_sync_kept_is_refused(
    version: int, strategy: str | None, run_processes
) -> None:
    options = {"sharding_strategy": strategy} if strategy else {}
    for said in run_processes(stepping_on_what_no_sync_kept, version, options):
        assert "are not reduced: its window ends here" in str(said)


def evaluating_before_a_step_by_items(version: int) -> float:
    run = accelerator(plugin("mlp", version))
    given, plain = net("mlp"), net("mlp")
    model, optimizer = run.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1))
    x, y = batch("mlp", 0)
    for window in run.windows([(x, y)], model, items=lambda batch: len(batch[0])):
        for x, y in window:
            run.backward(loss_of(model, x, y))
            with torch.no_grad():
                model(x)
            optimizer.step()
    (loss_of(plain, x, y) / len(x)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return distance(run.get_state_dict(model, rank0_only=False), dict(plain.state_dict()))


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_an_evaluation_before_the_step_leaves_gradients_of_items_alone(version: int, run_processes) -> None:
    assert max(run_processes(evaluating_before_a_step_by_items, version)) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_one_process_has_nothing_to_reduce_in_no_sync(version: int, run_processes) -> None:
    (distance_to_plain,) = run_processes(stepping_on_what_no_sync_kept, version, {}, world=1)
    assert distance_to_plain == 0


def dropped(version: int, way: str | None, folder: str) -> dict[str, Tensor]:
    """Weights after two steps; gradients of a micro-batch that is dropped by `way` come between them."""
    run = accelerator(plugin("mlp", version))
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    for step in range(2):
        if step == 1 and way is not None:
            run.save_state(folder)
            with run.no_sync(model):
                run.backward(10 * loss_of(model, *batch("mlp", 7, 1)))
            drop = {
                "optimizer": optimizer.zero_grad,
                "model": model.zero_grad,
            }
            drop.get(way, lambda: run.load_state(folder))()
        run.backward(loss_of(model, *batch("mlp", step, 1)))
        optimizer.step()
        optimizer.zero_grad()
    found = dict(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("way", ["optimizer", "model", "load_state"])
def test_gradients_that_were_dropped_before_they_were_reduced_join_no_step(
    version: int, way: str, tmp_path: Path, run_processes
) -> None:
    """Version 2 keeps them apart from `parameter.grad`, where `zero_grad` does not see them."""
    wanted, _ = run_processes(dropped, version, None, "")
    for found in run_processes(dropped, version, way, str(tmp_path / "saved")):
        assert distance(found, wanted) == 0


def dropped_in_part(options: dict[str, Any] | None, way: str) -> dict[str, Tensor]:
    """Weights after three steps of two optimizers, one of which drops its gradients within a window.

    options: None for plain torch, which has both ranks' batches at once.
    """
    run = accelerator(plugin("mlp", **options)) if options is not None else None
    model: Any = net("mlp")
    parameters = list(model.parameters())  # the second block has some of both optimizers
    first: Any = torch.optim.SGD(parameters[:5], lr=0.1)
    second: Any = torch.optim.SGD(parameters[5:], lr=0.1)
    if run is not None:
        model, first, second = run.prepare(model, first, second)

    def backward(seed: int, *, reduces: bool = True) -> None:
        if run is None:
            loss_of(model, *batch("mlp", seed, 2)).backward()
            return
        x, y = (half.chunk(2)[run.process_index] for half in batch("mlp", seed, 2))
        with nullcontext() if reduces else run.no_sync(model):
            run.backward(loss_of(model, x, y))

    for step in range(3):
        if way in ("after a reduction", "all"):
            backward(step + 20)
        backward(step, reduces=False)
        first.zero_grad()
        if way == "twice":
            backward(step + 30, reduces=False)
            second.zero_grad()
        if way == "all":
            second.zero_grad()
        backward(step + 10)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    found = dict(model.state_dict() if run is None else run.get_state_dict(model, rank0_only=False))
    if run is not None:
        run.end_training()
    return found


def all_dropped_in_part(cases: list[tuple[dict[str, Any], str]]) -> list[dict[str, Tensor]]:
    return [dropped_in_part(*case) for case in cases]


@pytest.mark.full
def test_one_of_two_optimizers_may_drop_its_gradients_within_a_window(run_processes) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, way) for way in ("once", "after a reduction", "twice", "all")
    ]
    for found in run_processes(all_dropped_in_part, cases):
        for (each, way), weights in zip(cases, found, strict=True):
            assert distance(weights, dropped_in_part(None, way)) < 1e-6, (each, way)


def with_forwards(version: int, precision: str, skips: bool, twice: bool) -> dict[str, Tensor]:
    """Weights after three steps. skips: before each, a forward without backward. twice: two of one loss."""
    run = accelerator(plugin("mlp", version), mixed_precision=precision)
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    for step in range(3):
        if skips:
            skipped = loss_of(model, *batch("mlp", 7, 1))  # noqa: F841  whose graph lives on
        loss = loss_of(model, *batch("mlp", step, 1))
        run.backward(loss + loss_of(model, *batch("mlp", step, 1)) if twice else 2 * loss)
        optimizer.step()
        optimizer.zero_grad()
    found = dict(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize(("version", "precision"), [(1, "no"), (2, "no"), (2, "bf16")])
def test_a_forward_without_backward_changes_nothing(version: int, precision: str, run_processes) -> None:
    wanted, _ = run_processes(with_forwards, version, precision, False, False)
    assert distance(wanted, net("mlp").state_dict()) > 0.01
    for skips, twice in ((True, False), (False, True), (True, True)):
        for found in run_processes(with_forwards, version, precision, skips, twice):
            assert distance(found, wanted) == 0


def says_that_gradients_are_lost(way: str) -> tuple[int, str]:
    """The step of version 1 in bf16 that is refused."""
    run = accelerator(plugin("mlp", 1), mixed_precision="bf16")
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    try:
        for step in range(3):
            if way == "skipped batch" and step == 1:
                loss_of(model, *batch("mlp", 7, 1))
            run.backward(loss_of(model, *batch("mlp", step, 1)))
            if way == "printed loss":
                loss_of(model, *batch("mlp", 7, 1))
            optimizer.step()
            optimizer.zero_grad()
    except AccelError as error:
        return step, str(error)
    finally:
        run.end_training()


@pytest.mark.parametrize("way", ["skipped batch", "printed loss"])
@pytest.mark.by_default("skipped batch")
def test_version_1_in_bf16_says_that_a_forward_without_backward_loses_gradients(
    way: str, run_processes
) -> None:
    """torch reduces in the backward of the first forward alone: no step after it would train."""
    for step, said in run_processes(says_that_gradients_are_lost, way):
        assert step == 1
        assert "a forward before it had a graph and no backward\n" in said
        assert said.endswith("or set fsdp.fsdp_version: 2")


def of_two_forwards(times: int) -> dict[str, Tensor]:
    run = accelerator(plugin("mlp", 1), mixed_precision="bf16")
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    for step in range(3):
        run.backward(sum(loss_of(model, *batch("mlp", step, 1)) for _ in range(times)) / times)
        optimizer.step()
        optimizer.zero_grad()
    found = dict(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return found


@pytest.mark.full
def test_version_1_in_bf16_trains_a_loss_of_two_forwards(run_processes) -> None:
    for one, two in zip(run_processes(of_two_forwards, 1), run_processes(of_two_forwards, 2), strict=True):
        assert distance(one, two) == 0


def weights_with_names() -> set[str]:
    run = accelerator(plugin("mlp", 1, sharding_strategy="NO_SHARD"))
    given = net("mlp")
    given[1].requires_grad_(False)
    trained = [parameter for parameter in given.parameters() if parameter.requires_grad]
    model, _ = run.prepare(given, torch.optim.SGD(trained, lr=0.1))
    loss_of(model, *batch("mlp", 1, 1))
    run.backward(loss_of(model, *batch("mlp", 0, 1)))
    named = set(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return named


@pytest.mark.full
def test_frozen_weights_keep_their_names_after_a_forward_without_backward(run_processes) -> None:
    """Where version 1 cuts nothing, a save would have left them out."""
    names = net("mlp").state_dict().keys()
    assert run_processes(weights_with_names) == [set(names)] * 2


def after_gradients_of_inputs(options: dict[str, Any], first: bool) -> dict[str, Tensor]:
    run = accelerator(plugin("mlp", **options))
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    for step in range(3):
        x, y = batch("mlp", step, 1)
        if first:
            loss_of(model, x, y)  # the first forward may have no backward
            torch.autograd.grad(loss_of(model, inputs := x.requires_grad_(), y), inputs)
        run.backward(loss_of(model, x.detach(), y))
        optimizer.step()
        optimizer.zero_grad()
    found = dict(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("cut", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_backward_for_inputs_alone_changes_nothing(cut: str, run_processes) -> None:
    options = {"version": 1, "sharding_strategy": cut}
    wanted, _ = run_processes(after_gradients_of_inputs, options, False)
    for found in run_processes(after_gradients_of_inputs, options, True):
        assert distance(found, wanted) == 0


def evaluated(version: int, first: bool) -> dict[str, Tensor]:
    run = accelerator(plugin("mlp", version))
    model, optimizer = run.prepare(given := net("mlp"), torch.optim.SGD(given.parameters(), lr=0.1))
    for step in range(2):
        if first:
            with torch.inference_mode():
                model(batch("mlp", step, 1)[0])
        run.backward(loss_of(model, *batch("mlp", step, 1)))
        optimizer.step()
        optimizer.zero_grad()
    found = dict(run.get_state_dict(model, rank0_only=False))
    run.end_training()
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_an_evaluation_in_inference_mode_may_come_first(version: int, run_processes) -> None:
    """The memory that it gathers weights into is that of later forwards, which train."""
    wanted, _ = run_processes(evaluated, version, False)
    for found in run_processes(evaluated, version, True):
        assert distance(found, wanted) == 0


def unfrozen_by_and_by(options: dict[str, Any] | None) -> dict[str, Tensor]:
    """Weights after steps in which blocks are frozen and trained again. options: None for plain torch."""
    run = None if options is None else accelerator(plugin("mlp", **options))
    given = model = net("mlp")
    given[1].requires_grad_(False)
    trained = [each for each in given.parameters() if each.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    if run is not None:
        model, optimizer = run.prepare(given, optimizer)
    for step in range(5):
        if step == 1:
            given[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(given[1].parameters()), "lr": 0.05})
        given[2].requires_grad_(step != 3)
        loss = loss_of(model, *batch("mlp", step, 1))
        loss.backward() if run is None else run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    found = dict(model.state_dict() if run is None else run.get_state_dict(model, rank0_only=False))
    if run is not None:
        run.end_training()
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.by_default("2")
def test_parts_may_be_frozen_trained_again_and_given_a_group(version: int, run_processes) -> None:
    for found in run_processes(unfrozen_by_and_by, {"version": version}):
        assert distance(found, unfrozen_by_and_by(None)) < 1e-6


def frozen_in_a_window() -> str:
    run = accelerator(plugin("mlp", 1), gradient_accumulation_steps=2)
    model = net("mlp")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 6)
    with run.accumulate(model):
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)
    with pytest.raises(AccelError) as caught:
        model(x)
    return str(caught.value)


def test_version_1_refuses_to_drop_the_gradients_of_a_model_that_is_frozen_in_a_window(run_processes) -> None:
    for said in run_processes(frozen_in_a_window, world=2):
        assert said.startswith("a block was frozen while it has gradients that no step has used")
