"""Several engines in one run, models built in shards, and what is refused before an engine is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_problem import accelerator, adamw, data, network, sgd, weights, whole_weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError
from accel_deepspeed import DeepSpeedPlugin, DummyOptim, select

pytestmark = pytest.mark.timeout(300)

NAMED = """
strategy: student
strategies:
  student: {plugin: deepspeed, zero_stage: 2}
  teacher: {plugin: deepspeed, zero_stage: 3}
"""


def one_loss_of_two_engines() -> tuple[list[float], list[float], list[str]]:
    ours, x, y = Accelerator(cpu=True), *data()[0:8]
    one, two, plain_one, plain_two = network(1), network(2), network(1), network(2)
    one, first = ours.prepare(one, sgd(one.parameters()))
    select(ours.run, "teacher")
    two, second = ours.prepare(two, sgd(two.parameters()))
    optimizers = [first, second, sgd(plain_one.parameters()), sgd(plain_two.parameters())]
    for _ in range(3):
        ours.backward(mse_loss(one(x) + two(x), y))
        mse_loss(plain_one(x) + plain_two(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stages = [unit.strategy for unit in ours.run.units]
    found = whole_weights(ours, one) + whole_weights(ours, two)
    ours.end_training()
    return found, weights(plain_one) + weights(plain_two), stages


def test_plugins_by_name_make_units_that_share_a_loss(tmp_path: Path, run_processes) -> None:
    file = tmp_path / "accel.yaml"
    file.write_text(NAMED)
    environment = {"ACCEL_CONFIG": str(file)}
    for found, plain, stages in run_processes(one_loss_of_two_engines, environment=environment):
        assert found == pytest.approx(plain, rel=1e-6, abs=1e-6)
        assert stages == ["student", "teacher"]


def without_an_optimizer(stage: int) -> tuple[str, bool]:
    """What is said of a backward, and whether an optimizer trains that is prepared then."""
    ours, (x, y) = accelerator(DeepSpeedPlugin(zero_stage=stage)), data()[0:8]
    model = ours.prepare(network())
    with pytest.raises(AccelError) as told:
        ours.backward(mse_loss(model(x), y))
    late = ours.prepare(sgd(ours.unwrap_model(model).parameters()))
    before = whole_weights(ours, model)
    ours.backward(mse_loss(model(x), y))
    late.step()
    return str(told.value), whole_weights(ours, model) != before


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.by_default
def test_a_backward_without_a_prepared_optimizer_is_refused_before_each_rank_trains_alone(
    stage: int, run_processes
) -> None:
    for said, trains in run_processes(without_an_optimizer, stage):
        assert said.startswith("backward: no prepared optimizer steps unit 'unit0', and its gradients are")
        assert trains


def weights_of_a_part(stage: int) -> bool | str:
    """Whether the weights of a part of the model are those that it was made of, or what is said."""
    ours = accelerator(DeepSpeedPlugin(zero_stage=stage))
    model = network()
    expected = weights(model[0])
    engine, _ = ours.prepare(model, sgd(model.parameters()))
    try:
        found = ours.get_state_dict(ours.unwrap_model(engine)[0], rank0_only=False)  # type: ignore[index]
        return torch.cat([each.flatten() for each in found.values()]).tolist() == expected
    except AccelError as error:
        return str(error)
    finally:
        ours.end_training()


def test_weights_of_a_part_are_given_where_each_rank_has_them_whole(run_processes) -> None:
    assert run_processes(weights_of_a_part, 2) == [True, True]
    for said in run_processes(weights_of_a_part, 3):
        assert "of which this rank has parts" in str(said)


def built_in_shards() -> tuple[list[int], list[float], list[float], bool]:
    ours = accelerator(DeepSpeedPlugin(hf_ds_config=SHARDED))
    with ours.model_init_context():
        model: Any = network()
    held = [parameter.numel() for parameter in model.parameters()]
    outside = hasattr(nn.Linear(2, 2).weight, "ds_id")
    plain, x, y = network(), *data()[0:8]
    model, optimizer = ours.prepare(model, sgd(model.parameters()))
    by_hand = sgd(plain.parameters())
    losses, expected = [], []
    for _ in range(4):
        loss, plain_loss = mse_loss(model(x), y), mse_loss(plain(x), y)
        ours.backward(loss)
        plain_loss.backward()
        for each in (optimizer, by_hand):
            each.step()
            each.zero_grad()
        losses.append(loss.item())
        expected.append(plain_loss.item())
    ours.end_training()
    return held, losses, expected, outside


SHARDED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def test_a_model_is_sharded_while_it_is_built_and_only_there(run_processes) -> None:
    for held, losses, expected, outside in run_processes(built_in_shards):
        assert held == [0] * len(held)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert not outside


def transformers_from_pretrained(folder: str) -> tuple[int, list[bool], list[float], list[float], bool]:
    from transformers import AutoModelForCausalLM
    from transformers.integrations import is_deepspeed_zero3_enabled

    zero = SHARDED["zero_optimization"] | {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    }
    ours = accelerator(DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero}))
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    with ours.model_init_context():
        known = [is_deepspeed_zero3_enabled()]
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
    known.append(is_deepspeed_zero3_enabled())
    held = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = ours.prepare(model, sgd(model.parameters()))
    by_hand, tokens = sgd(plain.parameters()), torch.arange(16).reshape(2, 8) % 11
    losses, expected = [], []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        plain_loss = plain(input_ids=tokens, labels=tokens).loss
        ours.backward(loss)
        plain_loss.backward()
        for each in (optimizer, by_hand):
            each.step()
            each.zero_grad()
        losses.append(loss.item())
        expected.append(plain_loss.item())
    with ours.full_parameters(model):
        said = ours.unwrap_model(model).generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    whole = plain.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    ours.end_training()
    return held, known, losses, expected, torch.equal(said, whole)


@pytest.mark.filterwarnings("ignore")  # torchao, which transformers imports, warns of its own binaries
def test_transformers_shards_what_it_loads_inside_the_context_only_trains_and_generates(
    tmp_path: Path, run_processes
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for held, known, losses, expected, same in run_processes(
        transformers_from_pretrained, str(tmp_path), timeout=200
    ):
        assert held == 0
        assert known == [True, False]
        assert losses == pytest.approx(expected, rel=1e-6)
        assert same, "what it generates with its parameters whole"


# -- options ---------------------------------------------------------------------------------------


def batch_sizes() -> list[int]:
    """What DeepSpeed is told, of loaders of 4 and of 8: by the option unset, and set to False."""
    found = []
    for plugin in (DeepSpeedPlugin(), DeepSpeedPlugin(is_train_batch_min=False)):
        ours, model = accelerator(plugin), network()
        ours.prepare(model, sgd(model.parameters()), DataLoader(data(), 4), DataLoader(data(), 8))
        found.append(ours.run.units[0].config.deepspeed_config["train_micro_batch_size_per_gpu"])
        ours.end_training()
    return found


def test_of_several_loaders_the_smallest_tells_the_batch_size_or_the_largest(run_processes) -> None:
    assert run_processes(batch_sizes, world=1) == [[4, 8]]


def fetched_together() -> tuple[list[bool], str]:
    from deepspeed.utils import z3_leaf_module

    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Sequential, LayerNorm")
    ours, model = accelerator(plugin), nn.Sequential(network(1), nn.Linear(3, 3))
    ours.prepare(model, sgd(model.parameters()))
    found = [z3_leaf_module(each) for each in (model[0], model[0][1], model[1])]
    other = nn.Linear(2, 2)
    try:
        ours.prepare(other, sgd(other.parameters()))
    except AccelError as error:
        return found, str(error)
    return found, ""


def test_layers_named_as_experts_are_fetched_whole_and_unknown_names_are_refused(run_processes) -> None:
    ((leaves, said),) = run_processes(fetched_together, world=1)
    assert leaves == [True, True, False]
    assert "transformer_moe_cls_names: the Linear has no Sequential, LayerNorm" in said


def saved_by_deepspeed(folder: str) -> bool:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True)
    ours, model = accelerator(plugin, mixed_precision="bf16"), network()
    engine: Any = ours.prepare(model, sgd(model.parameters()))[0]
    engine.save_16bit_model(folder, "model.bin")
    ours.wait_for_everyone()
    saved, live = torch.load(f"{folder}/model.bin"), dict(ours.iter_weights(engine))
    same = saved.keys() == live.keys() and all(torch.equal(saved[name], live[name]) for name in live)
    ours.end_training()
    return same and {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}


def test_deepspeeds_own_save_of_16_bits_gathers_where_it_is_asked_to(tmp_path: Path, run_processes) -> None:
    assert run_processes(saved_by_deepspeed, str(tmp_path)) == [True, True]


# -- what is refused -----------------------------------------------------------------------------


def two_optimizers() -> None:
    ours, model = accelerator(), network()
    parameters = list(model.parameters())
    ours.prepare(model, sgd(parameters[:2]), sgd(parameters[2:]))


def a_frozen_group() -> None:
    ours, model = accelerator(), network()
    model[0].requires_grad_(False)
    ours.prepare(model, sgd([{"params": model[0].parameters()}, {"params": model[3].parameters()}]))


def two_models() -> None:
    ours, one, two = accelerator(), network(1), network(2)
    ours.prepare(one, two, adamw([*one.parameters(), *two.parameters()]))


def mismatches() -> None:
    sizes = {"train_batch_size": 99, "train_micro_batch_size_per_gpu": 7}
    ours, model = accelerator(DeepSpeedPlugin(hf_ds_config=sizes | SHARDED)), network()
    ours.prepare(model, sgd(model.parameters()), DataLoader(data(), 4))


def no_json_optimizer() -> None:
    ours, model = accelerator(), network()
    ours.prepare(model, DummyOptim(model.parameters()))


def unknown_width() -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto"}
    ours, model = accelerator(DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})), network()
    ours.prepare(model, sgd(model.parameters()))


def tensor_parallel() -> None:
    accelerator(DeepSpeedPlugin(hf_ds_config={"tensor_parallel": {"autotp_size": 2}}))


def another_norm() -> None:
    ours, model = accelerator(DeepSpeedPlugin(gradient_clipping=1.0)), network()
    model, _ = ours.prepare(model, sgd(model.parameters()))
    ours.backward(model(torch.ones(2, 6)).sum())
    ours.clip_grad_norm_(model.parameters(), 0.5)


def some_parameters() -> None:
    ours, model = accelerator(), network()
    model, _ = ours.prepare(model, sgd(model.parameters()))
    ours.backward(model(torch.ones(2, 6)).sum())
    ours.clip_grad_norm_(list(model.parameters())[:2], 1.0)


REFUSED: dict[Callable[[], None], str] = {
    two_optimizers: "give one optimizer several parameter groups",
    a_frozen_group: "all parameters of group 0 of the SGD are frozen",
    two_models: "put them in one nn.Module",
    mismatches: "train_micro_batch_size_per_gpu is 7 in the DeepSpeed config, but 4 by the prepared loaders'",
    no_json_optimizer: "a DummyOptim stands for the JSON's optimizer, but there is none",
    unknown_width: "nothing says what to fill in for zero_optimization.reduce_bucket_size",
    tensor_parallel: "ranks would have to read the same batches",
    another_norm: "clip_grad_norm_ asks for 0.5, and gradient_clipping of the DeepSpeed config for 1.0",
    some_parameters: "has more than were given",
}


def refusals() -> dict[str, str]:
    from accel_core.contract.run import live

    said = {}
    for case in REFUSED:
        try:
            case()
        except AccelError as error:
            said[case.__name__] = str(error)
        for run in live():
            run.end()
    return said


def moved_by_steps() -> list[float]:
    ours, model = accelerator(DeepSpeedPlugin(clip_unasked=0.5)), network()
    model, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for asked in (None, 0.25, float("inf"), None):
        before = torch.tensor(whole_weights(ours, model))
        ours.backward(1e3 * model(torch.ones(2, 6)).sum())
        if asked is not None:
            ours.clip_grad_norm_(model.parameters(), asked)
        optimizer.step()
        optimizer.zero_grad()
        found.append((torch.tensor(whole_weights(ours, model)) - before).norm().item())
    ours.end_training()
    return found


def test_steps_that_nobody_clips_are_clipped_to_clip_unasked(run_processes) -> None:
    (moved,) = run_processes(moved_by_steps, world=1)
    assert moved == pytest.approx([0.5, 0.25, 0.5, 0.5], rel=1e-3)


def test_what_cannot_be_is_said_before_training(run_processes) -> None:
    (said,) = run_processes(refusals, world=1)
    for case, message in REFUSED.items():
        assert message in said.get(case.__name__, "nothing"), case.__name__
    assert "train_batch_size is 99" in said["mismatches"], "all mismatches are listed at once"
