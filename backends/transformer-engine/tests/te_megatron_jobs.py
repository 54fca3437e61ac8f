"""Jobs for processes: a small Llama under strategy megatron, over the stand-in, with float8 and without."""

from __future__ import annotations

from typing import Any

import cuda_on_cpu
import torch
from megatron_jobs import quiet
from te_problem import TIMEOUT
from torch import nn

from accel_core import Accelerator, AccelError
from accel_megatron import MegatronLMPlugin
from accel_transformer_engine import TransformerEngineConfig

SHAPE = {
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(seed: int = 3) -> Any:
    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def accelerator(precision: str = "fp8-te", *, options: Any = None, **layout: Any) -> Accelerator:
    cuda_on_cpu.install()
    with quiet():
        import megatron.core.optimizer  # noqa: F401 - warns of what it does not find
    plugins = [TIMEOUT, MegatronLMPlugin(**layout)]
    if precision == "fp8-te":
        plugins.append(TransformerEngineConfig(**({"recipe": "current"} if options is None else options)))
    return Accelerator(device="cpu", strategy="megatron", mixed_precision=precision, plugins=plugins)


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randint(64, (count, 4, 8), generator=torch.Generator().manual_seed(1)))


def prepared(run: Accelerator, seed: int = 3) -> Any:
    net = llama(seed)
    return run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))


def steps(run: Accelerator, net: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for ids in data:
        loss = net(input_ids=ids, labels=ids).loss
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def forward(precision: str) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """Logits of the run; with float8 those of megatron-core's own model too, and what the run explains."""
    run = accelerator(precision)
    net, _ = prepared(run)
    ids = batches(1)[0]
    net.eval()
    with torch.no_grad():
        found = net(input_ids=ids).logits.float()
        hand = by_hand(net.chunks.raw[0], ids) if precision == "fp8-te" else None
    told = str(run.explain())
    run.end_training()
    return found, hand, told


def by_hand(chunk: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of a model that megatron-core's config and spec describe, with the same weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        fp8="hybrid",
        fp8_recipe="tensorwise",
    )
    made: Any = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=64,
        max_sequence_length=16,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).bfloat16()
    for name, parameter in made.named_parameters():
        parameter.copy_(chunk.get_parameter(name))
    made.eval()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    found: torch.Tensor = made(ids, positions, None).float()
    return found


def trained() -> tuple[list[float], list[str]]:
    """Losses, and the weights that four steps have left as they were."""
    run = accelerator()
    before = {name: each.clone() for name, each in llama().state_dict().items()}
    net, optimizer = prepared(run)
    losses = steps(run, net, optimizer, batches(4))
    after = run.get_state_dict(net, rank0_only=False)
    run.end_training()
    return losses, [
        name for name, each in before.items() if torch.equal(each.bfloat16(), after[name].bfloat16())
    ]


def resumed(folder: str) -> tuple[list[float], list[float]]:
    """Losses of two steps after a checkpoint, and those of a run that loads it."""
    found = []
    for seed in (3, 4):
        run = accelerator()
        net, optimizer = prepared(run, seed)
        if seed == 3:
            steps(run, net, optimizer, batches(4)[:2])
            run.save_state(folder)
        else:
            run.load_state(folder)
        found.append(steps(run, net, optimizer, batches(4)[2:]))
        run.end_training()
    return found[0], found[1]


DELAYED = {"recipe": "delayed", "amax_history_len": 8, "margin": 1}
Scales = dict[str, torch.Tensor]


def delayed(
    source: str | None, target: str | None, first: int, seed: int, layout: dict[str, Any]
) -> tuple[list[float], list[float], Scales, Scales]:
    """Losses of two steps, and of an evaluation; scales and histories before and after."""
    run = accelerator(options=DELAYED, num_micro_batches=2, **layout)
    net, optimizer = prepared(run, seed)
    if source is not None:
        run.load_state(source)
    before = scales(run)
    losses = steps(run, net, optimizer, batches(first + 2)[first:])
    if target is not None:
        run.save_state(target)
    after = scales(run)
    net.eval()
    with torch.no_grad():
        ids = batches(1)[0]
        checked = [float(net(input_ids=ids, labels=ids).loss)]
    run.end_training()
    return losses, checked, before, after


def unbroken() -> tuple[list[float], list[float]]:
    """The losses of steps three and four of one run, and of an evaluation after them."""
    run = accelerator(options=DELAYED, num_micro_batches=2)
    net, optimizer = prepared(run)
    losses = steps(run, net, optimizer, batches(4))[2:]
    net.eval()
    with torch.no_grad():
        ids = batches(1)[0]
        checked = [float(net(input_ids=ids, labels=ids).loss)]
    run.end_training()
    return losses, checked


def scales(run: Accelerator) -> Scales:
    from accel_transformer_engine.scaling import collect

    return {name: torch.as_tensor(entry.value) for name, entry in collect(run.run.units[0]).items()}


def after_an_evaluation(folder: str) -> tuple[Scales, Scales, Scales]:
    """Scales and histories as saved after an evaluation, two steps later, and two steps after a resumption.

    Ranks have other data.
    """
    found = []
    for resumes in (False, True):
        run = accelerator(options=DELAYED)
        net, optimizer = prepared(run)
        data = list(torch.randint(64, (5, 4, 8), generator=torch.Generator().manual_seed(run.process_index)))
        if resumes:
            run.load_state(folder)
        else:
            steps(run, net, optimizer, data[:2])
            net.eval()
            with torch.no_grad():
                net(input_ids=data[4], labels=data[4])
            net.train()
            run.save_state(folder)
            found.append(raw_scales(run))
        steps(run, net, optimizer, data[2:4])
        found.append(raw_scales(run))
        run.end_training()
    saved, expected, resumed = found
    return saved, expected, resumed


def raw_scales(run: Accelerator) -> Scales:
    """As they are on this rank."""
    from accel_transformer_engine.scaling import collect

    entries = collect(run.run.units[0], is_reduced=False)
    return {name: torch.as_tensor(entry.value) for name, entry in entries.items()}


def left_behind() -> tuple[list[str], int, int, str]:
    """Buffers that a run leaves, layers that compute in it, those with its recipe, what it explains."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    run = accelerator(options=DELAYED)
    net, optimizer = prepared(run)
    steps(run, net, optimizer, batches(1))
    layers = [each for _, each in net.own_layers() if getattr(each, "fp8_meta", {}).get("recipe") is not None]
    recipes = [each.fp8_meta["recipe"] for each in layers]
    right = [it for it in recipes if (it.margin, it.amax_history_len, it.amax_compute_algo) == (1, 8, "max")]
    told = str(run.explain())
    run.end_training()
    return list(Manager.quantization_state.global_amax_buffer), len(layers), len(right), told


class Own(nn.Module):
    """A forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def bert() -> Any:
    with quiet():
        from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))


def refusals() -> dict[str, str]:
    """What is asked -> the error."""
    cases: dict[str, dict[str, Any]] = {
        "history": {"other_megatron_args": {"fp8_amax_history_len": 4}},
        "reduction": {"options": {"recipe": "delayed", "reduce_amax": False}},
        "nvfp4": {"options": {"recipe": "nvfp4"}},
        "padding": {"options": {"recipe": "current", "pad_tokens": True}},
        "twice": {"other_megatron_args": {"fp8": "hybrid"}},
    }
    said = {}
    for name, options in cases.items():
        try:
            accelerator(**options).end_training()
        except AccelError as error:
            said[name] = str(error)
    for name, net in (("own", Own()), ("bert", bert())):
        run = accelerator()
        try:
            run.prepare(net)
        except AccelError as error:
            said[name] = str(error)
        run.end_training()
    for field in ("tp_only_amax_red", "fp8_dot_product_attention"):
        run = accelerator(options={}, other_megatron_args={field: True})
        try:
            run.prepare(llama())
        except AccelError as error:
            said[field] = str(error)
        run.end_training()
    run = accelerator("bf16")
    from accel_megatron import transformer_config

    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    for name, fields in (
        ("of megatron", {"fp8": "hybrid"}),
        ("weights", {"fp8": "hybrid", "fp8_param": True}),
    ):
        try:
            transformer_config(run, **sizes, **fields)
        except AccelError as error:
            said[name] = str(error)
    run.end_training()
    return said
