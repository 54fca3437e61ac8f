"""What else a step is: other precisions, groups, schedules, evaluation, and losses that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import MODELS, VOCABULARY, accelerator, batches, quiet
from torch.utils._python_dispatch import TorchDispatchMode

from accel_core import AccelError


def odd_vocabulary() -> tuple[float, float, torch.Size, float]:
    with quiet():
        from transformers import GPT2Config, GPT2LMHeadModel
    ours = accelerator(tp_degree=2)
    torch.manual_seed(2)
    settings = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY - 1, **settings)).eval()
    batch = {name: each % (VOCABULARY - 1) for name, each in batches(1)[0].items()}
    with torch.no_grad():
        wanted = model(**batch)
    model = ours.prepare(model)
    with torch.no_grad():
        found = model(**batch)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    rows = batch["attention_mask"].bool()
    far = float((logits - wanted.logits)[rows].abs().max())
    return float(found.loss), float(wanted.loss), logits.shape, far


def test_padding_of_an_odd_vocabulary_is_in_no_loss_and_no_logits(run_processes) -> None:
    for found, wanted, shape, far in run_processes(odd_vocabulary):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert shape == (8, 12, VOCABULARY - 1)
        assert far < 1e-4


def evaluated(options: dict[str, Any]) -> tuple[Any, ...]:
    ours = accelerator(**options)
    model = MODELS["llama"]().eval()
    batch = batches(1)[0]
    with torch.no_grad():
        wanted = model(input_ids=batch["input_ids"]).logits
    model = ours.prepare(model)
    with torch.no_grad():
        mine = model(input_ids=batch["input_ids"]).logits
        gathered = ours.gather_for_metrics(mine)
    output = ours.forward_backward(
        model,
        [batch, batch],
        lambda m, b: ((o := m(**b)).loss, o.loss.detach()),
        microbatches=2,
        forward_only=True,
    )
    return float((mine - wanted).abs().max()), tuple(gathered.shape), float(output.loss), len(output.outputs)


def test_evaluation_gives_logits_on_all_stages(run_processes) -> None:
    found = run_processes(evaluated, {"pp_degree": 2})
    assert all(far < 1e-5 and shape == (8, 12, VOCABULARY) for far, shape, _, _ in found)
    assert found[0][2] == found[1][2]
    assert [outputs for *_, outputs in found] == [0, 2]


def evaluated_in_rows(count: int) -> tuple[float, float]:
    """Distances of logits and loss from plain PyTorch's, of a batch of so many rows."""
    ours = accelerator(pp_degree=2, num_layers_per_virtual_pipeline_stage=1)
    model = MODELS["llama"]().eval()
    batch = {name: each[:count] for name, each in batches(1)[0].items()}
    with torch.no_grad():
        wanted = model(**batch)
        model = ours.prepare(model)
        loss = model(**batch).loss
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    counts = batch["attention_mask"].bool()
    return float((logits - wanted.logits)[counts].abs().max()), float((loss - wanted.loss).abs())


@pytest.mark.full
def test_interleaved_stages_evaluate_a_batch_that_is_cut_into_fewer_parts_than_stages(run_processes) -> None:
    for distances in run_processes(evaluated_in_rows, 3):
        assert max(distances) < 1e-5


def tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def counted(options: dict[str, Any]) -> tuple[float, float, float, float]:
    """(loss a token, norm) of sums over the tokens that count, and of plain PyTorch over all of the batch."""
    ours = accelerator(**options)
    batch, model = batches(1)[0], MODELS["llama"]()
    wanted = model(**batch).loss
    wanted.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.zero_grad()
    model, _ = ours.prepare(model, torch.optim.AdamW(model.parameters()))
    parts = [{name: each[at : at + 2] for name, each in batch.items()} for at in range(0, 8, 2)]
    (window,) = ours.windows(parts, model, items=tokens, size=len(parts))
    found = ours.forward_backward(model, window, lambda m, b: (m(**b).loss * tokens(b), None))
    mine = ours.clip_grad_norm_(model.parameters(), 0.5)
    return float(found.loss), float(mine), float(wanted.detach()), float(norm)


@pytest.mark.parametrize("options", [{}, {"pp_degree": 2}])
def test_losses_that_are_sums_are_divided_by_the_tokens_of_the_window(
    options: dict[str, Any], run_processes
) -> None:
    for loss, norm, plainly, its in run_processes(counted, options, world=options.get("pp_degree", 1)):
        assert (loss, norm) == pytest.approx((plainly, its), rel=1e-4)


def in_16_bits(name: str, options: dict[str, Any]) -> tuple[list[float], str, str]:
    ours = accelerator(mixed_precision=name, **options)
    model = MODELS["llama"]()
    first = model.lm_head.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ours.prepare(model, optimizer)
    whole = next(
        w for n, w in ours.run.hooks.iter_weights(ours.run.units[0], torch.float32, None) if "lm_head" in n
    )
    assert torch.equal(whole, first), "masters keep all digits of the user's weights"
    losses = []
    for _ in range(6):
        loss = model(**batches(1)[0]).loss
        ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = ours.get_state_dict(model, rank0_only=False)
    return losses, str(next(iter(state.values())).dtype), str(loss.dtype)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bf16", {"tp_degree": 2, "gradient_clipping": 1.0}),
        ("bf16", {"use_distributed_optimizer": True}),
        ("fp16", {"pp_degree": 2, "other_megatron_args": {"initial_loss_scale": 256.0}}),
    ],
)
@pytest.mark.by_default
def test_weights_in_16_bits_train(name: str, options: dict[str, Any], run_processes) -> None:
    for losses, stored, computed in run_processes(in_16_bits, name, options):
        assert losses[-1] < losses[0] - 0.3
        assert (stored, computed) == (
            {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[name],
            "torch.float32",
        )


def refused() -> None:
    ours = accelerator(num_micro_batches=2)
    model = MODELS["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ours.prepare(model, optimizer)
    batch = batches(1)[0]
    loss = model(**batch).loss
    with pytest.raises(AccelError, match="this is another"):
        ours.backward(loss * 2)
    optimizer.zero_grad()
    with pytest.raises(AccelError, match="has no labels"):
        model(input_ids=batch["input_ids"])
    with pytest.raises(AccelError, match="not 'token_type_ids'"):
        model(**batch, token_type_ids=batch["input_ids"])
    with pytest.raises(AccelError, match="by name"):
        model(batch["input_ids"])
    with pytest.raises(AccelError, match="of one size"):
        model(**{name: each[:3] for name, each in batch.items()})
    with pytest.raises(AccelError, match="whole weights"), ours.full_parameters(model):
        pass
    other, llama = MODELS["gpt2"](), MODELS["llama"]()
    names = dict(llama.named_parameters())
    some = {name: each for name, each in names.items() if "q_proj" in name}
    rest = [each for name, each in names.items() if name not in some]
    with pytest.raises(AccelError, match="Adafactor needs whole weights"):
        ours.prepare(other, torch.optim.Adafactor(other.parameters()))
    with pytest.raises(AccelError, match="one tensor in megatron-core"):
        ours.prepare(llama, torch.optim.AdamW([{"params": list(some.values())}, {"params": rest}]))


def test_what_would_go_wrong_unseen_is_refused(run_processes) -> None:
    run_processes(refused, world=1)


def refused_in_parts() -> None:
    with pytest.raises(AccelError, match="leave parallelism.tp and parallelism.pp at 1"):
        accelerator(tp_degree=2).prepare(torch.nn.Linear(2, 2))
    with pytest.raises(AccelError, match="weight is float64, and megatron-core steps in float32"):
        accelerator(tp_degree=2).prepare(torch.nn.Linear(2, 2).double())
    with pytest.raises(AccelError, match="weight is torch.complex64, and megatron-core adds up"):
        accelerator(tp_degree=2).prepare(torch.nn.Linear(2, 2, dtype=torch.complex64))


@pytest.mark.full
def test_a_model_without_a_twin_is_split_over_no_ranks(run_processes) -> None:
    run_processes(refused_in_parts)


def scaled_otherwise() -> None:
    from accel_core import GradScalerKwargs

    with pytest.raises(AccelError, match=r"growth_factor is 3\.0"):
        accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(growth_factor=3.0)])


@pytest.mark.full
def test_a_loss_scale_that_megatron_core_has_not_is_refused(run_processes) -> None:
    run_processes(scaled_otherwise, world=1)


def by_hand(options: dict[str, Any], precision: str) -> float:
    """A loop with a loss of its own, around a model without adapter; its distance from plain PyTorch."""
    torch.manual_seed(3)
    made = [
        torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)) for _ in range(2)
    ]
    made[1].load_state_dict(made[0].state_dict())
    reference = made[1]
    ours = accelerator(mixed_precision=precision, **options)
    ours.run.accumulation_steps = 2
    model, optimizer = ours.prepare(made[0], torch.optim.AdamW(made[0].parameters(), lr=1e-2, eps=1e-5))
    reference.load_state_dict(ours.get_state_dict(model, rank0_only=False))  # rank 0's
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-5)
    torch.manual_seed(4)
    for data in torch.rand(6, 8, 6):
        mine = data[ours.run.topology.reader :: ours.run.topology.readers]
        with ours.accumulate(model):
            ours.backward(model(mine).square().mean())
            ours.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        (reference(data).square().mean() / 2).backward()
        if ours.sync_gradients:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            plain.step()
            plain.zero_grad()
    found = ours.get_state_dict(model, rank0_only=False)
    assert found.keys() == reference.state_dict().keys()
    return max(
        float((found[name].float() - each).abs().max()) for name, each in reference.state_dict().items()
    )


@pytest.mark.parametrize(
    ("options", "precision", "far"),
    [
        ({}, "no", 1e-6),
        ({"other_megatron_args": {"overlap_grad_reduce": True}}, "no", 1e-6),
        ({"use_distributed_optimizer": True}, "bf16", 2e-2),
        (
            {
                "use_distributed_optimizer": True,
                "other_megatron_args": {"overlap_grad_reduce": True, "overlap_param_gather": True},
            },
            "no",
            1e-6,
        ),
        ({}, "fp16", 5e-3),
    ],
)
def test_any_model_trains_where_each_rank_has_all_of_it(
    options: dict[str, Any], precision: str, far: float, run_processes
) -> None:
    for found in run_processes(by_hand, options, precision):
        assert found < far


def accumulated(overlap: bool) -> float:
    """The same tokens in one window of two calls, and in one call: the weights that come of it, apart."""
    found = []
    for calls in (1, 2):
        ours = accelerator(num_micro_batches=2, other_megatron_args={"overlap_grad_reduce": overlap})
        ours.run.accumulation_steps = calls
        model = MODELS["gpt2"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = ours.prepare(model, optimizer)
        batch = {"input_ids": batches(1)[0]["input_ids"], "labels": batches(1)[0]["input_ids"]}
        topology = ours.run.topology
        batch = {name: each[topology.reader :: topology.readers] for name, each in batch.items()}
        rows = 8 // calls // topology.readers
        for at in range(calls):
            with ours.accumulate(model):
                ours.backward(model(**{name: each[at * rows :][:rows] for name, each in batch.items()}).loss)
                optimizer.step()
                optimizer.zero_grad()
        found.append(ours.get_state_dict(model, rank0_only=False))
        ours.end_training()
    return max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_calls_accumulate_in_a_window(overlap: bool, run_processes) -> None:
    assert all(far < 1e-6 for far in run_processes(accumulated, overlap))


def in_windows(overlap: bool, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], str]:
    """Weights after windows, the second of which is dropped; what is said of two backwards before a step."""
    ours = accelerator(num_micro_batches=2, other_megatron_args={"overlap_grad_reduce": overlap}, **options)
    ours.gradient_accumulation_steps = 2
    model = MODELS["gpt2"]()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    topology = ours.run.topology
    for number, batch in enumerate(batches(6)):
        with ours.accumulate(model):
            ours.backward(
                model(
                    **{name: each[topology.reader :: topology.readers] for name, each in batch.items()}
                ).loss
            )
            if number // 2 != 1:
                optimizer.step()
            optimizer.zero_grad()
    weights = {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    try:
        for batch in batches(2):
            ours.backward(model(**batch).loss)
    except AccelError as error:
        return weights, str(error)
    return weights, "nothing"


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "options"), [(2, {}), (4, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1})]
)
def test_gradients_reduced_during_backward_are_those_reduced_after_it(
    world: int, options: dict[str, Any], run_processes
) -> None:
    after = run_processes(in_windows, False, options, world=world)
    during = run_processes(in_windows, True, options, world=world)
    for (wanted, said), (found, refused) in zip(after, during, strict=True):
        torch.testing.assert_close(found, wanted)
        assert said == "nothing"
        assert refused.startswith("megatron: backward came after another one without optimizer.step()")


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def unread(items: bool) -> tuple[int, list[float]]:
    """How often backward waits for the device, and norms of windows of two."""
    ours = accelerator(num_micro_batches=2)
    model = MODELS["gpt2"]()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    reads, norms = 0, []
    (window,) = ours.windows(batches(1) * 2, model, items=(lambda _: 0.5) if items else None, size=2)
    for batch in window:
        loss = model(**batch).loss
        with Reads() as counted:
            ours.backward(loss)
        reads += counted.count
        norms += [float(each) for each in [ours.clip_grad_norm_(model.parameters(), 1e9)] if each]
        optimizer.step()
        optimizer.zero_grad()
    return reads, norms


@pytest.mark.full
@pytest.mark.parametrize("items", [False, True])
def test_backward_of_the_models_own_loss_waits_for_nothing(items: bool, run_processes) -> None:
    ((reads, norms),) = run_processes(unread, items, world=1)
    ((_, again),) = run_processes(unread, not items, world=1)
    assert reads == 0
    # Two losses by two micro-batches, or by two halves of an item.
    assert norms == pytest.approx([again[0] * (2 if items else 0.5)])


def read() -> list[list[float]]:
    """Ranks of one model draw other random numbers while they read."""
    ours = accelerator(tp_degree=2)
    torch.manual_seed(ours.process_index)
    data = [torch.rand(2) for _ in range(4)]
    loader = ours.prepare(torch.utils.data.DataLoader(data, batch_size=2))
    return [batch.flatten().tolist() for batch in loader]


@pytest.mark.full
def test_ranks_of_one_model_train_on_what_the_first_has_read(run_processes) -> None:
    one, other = run_processes(read)
    assert one == other
    assert len(one) == 2


def scheduled() -> tuple[list[list[float]], list[list[float]]]:
    from accel_megatron import MegatronLMDummyScheduler

    ours = accelerator(
        lr_decay_iters=10,
        lr_warmup_iters=2,
        lr_decay_style="cosine",
        min_lr=0.001,
        weight_decay_incr_style="linear",
        start_weight_decay=0.0,
        end_weight_decay=0.1,
        no_wd_decay_cond=lambda name, parameter: parameter.ndim == 1,
        scale_lr_cond=lambda name, parameter: "wte" in name,
        lr_mult=0.5,
    )
    model = MODELS["gpt2"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, scheduler = ours.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer))
    rates, decays = [], []
    for _ in range(3):
        ours.backward(model(**batches(1)[0]).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
        decays.append([group["weight_decay"] for group in optimizer.param_groups])
    return rates, decays


def test_megatrons_schedule_sets_rates_and_decays_by_group(run_processes) -> None:
    ((rates, decays),) = run_processes(scheduled, world=1)
    assert rates[0] == pytest.approx([0.025, 0.05, 0.05])
    assert rates[1] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[2][1] < 0.1
    assert decays[1] == pytest.approx([0.02, 0.02, 0.0])


def late(together: bool) -> list[float]:
    ours = accelerator(pp_degree=2, use_distributed_optimizer=True)
    model = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if together:
        model, optimizer = ours.prepare(model, optimizer)
    else:
        model = ours.prepare(model)
        optimizer = ours.prepare(optimizer)
    losses = []
    for batch in batches(3):
        loss = model(**batch).loss
        ours.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_an_optimizer_may_come_late(run_processes) -> None:
    assert run_processes(late, False) == run_processes(late, True)


def on_their_way(folder: str, overlap: bool) -> list[float]:
    """Losses in evaluation at once after each of two steps, and after the first's state is loaded again."""
    gathers = {"overlap_grad_reduce": True, "overlap_param_gather": True} if overlap else {}
    ours = accelerator(use_distributed_optimizer=True, other_megatron_args=gathers)
    model = MODELS["gpt2"]()
    model, optimizer = ours.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5))
    batch, found = batches(1)[0], []

    def evaluated() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(model(**batch).loss)
        model.train()
        return loss

    for step in range(2):
        ours.backward(model(**batch).loss)
        optimizer.step()
        found.append(evaluated())
        optimizer.zero_grad()
        if step == 0:
            ours.save_state(folder)
    ours.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
    ours.load_state(folder)
    return [*found, evaluated()]


@pytest.mark.full
def test_weights_that_are_gathered_beside_forward_are_waited_for(tmp_path: Path, run_processes) -> None:
    (wanted, _), (found, other) = (
        run_processes(on_their_way, str(tmp_path / str(overlap)), overlap) for overlap in (False, True)
    )
    assert found == other == pytest.approx(wanted, rel=1e-6)
    assert found[2] == found[0] > found[1]


def unstepped(own_loop: bool, optimizer: bool) -> str:
    """What is said of a backward where the optimizer was not prepared."""
    ours = accelerator()
    model, batch = MODELS["gpt2"](), batches(1)[0]
    given = [torch.optim.SGD(model.parameters(), lr=0.1)] if optimizer else []
    model, *_ = prepared if isinstance(prepared := ours.prepare(model, *given), tuple) else (prepared,)
    try:
        if own_loop:
            model(**batch).loss.backward()
        else:
            ours.forward_backward(model, [batch], lambda m, b: (m(**b).loss, None), microbatches=1)
    except AccelError as error:
        return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("own_loop", [True, False])
def test_gradients_that_an_optimizer_which_is_not_prepared_cannot_see_are_an_error(
    own_loop: bool, run_processes
) -> None:
    (said,) = run_processes(unstepped, own_loop, False, world=1)

    assert said.startswith("megatron: backward of GPT2LMHeadModel, which was prepared without an optimizer")
    assert run_processes(unstepped, own_loop, True, world=1) == [""]


def stepped_by_its_own() -> bool:
    ours = accelerator()
    model = torch.nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model = ours.prepare(model)
    ours.forward_backward(model, [torch.ones(1, 2)], lambda m, x: (m(x).sum(), None), microbatches=1)
    optimizer.step()
    return torch.equal(ours.unwrap_model(model).weight, before - 0.5)


@pytest.mark.full
def test_any_other_model_in_one_process_has_gradients_for_any_optimizer(run_processes) -> None:
    assert run_processes(stepped_by_its_own, world=1) == [True]
