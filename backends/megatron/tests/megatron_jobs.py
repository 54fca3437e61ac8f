"""Training jobs for processes: a small transformers model under `megatron`, and natively."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cuda_on_cpu
import torch
from torch import nn

VOCABULARY, LENGTH = 66, 12


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries that warn when they are imported, once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gpt2(seed: int = 3, **settings: Any) -> nn.Module:
    with quiet():
        from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **settings,
    )
    return GPT2LMHeadModel(config)


def llama(seed: int = 3, **settings: Any) -> nn.Module:
    with quiet():
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 7,
    }
    config = LlamaConfig(**(shape | settings))
    return LlamaForCausalLM(config)


def bert(seed: int = 3, **settings: Any) -> nn.Module:
    with quiet():
        from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    model = BertForMaskedLM(BertConfig(**(shape | settings)))
    for each in model.parameters():
        if each.ndim == 1:  # zeros and ones would hide a bias in the wrong place
            each.data += 0.1 * torch.randn(each.shape)
    return model


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def batches(count: int, rows: int = 8, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    # eps: gradients that are zero in exact arithmetic (of keys' biases) are none to be stepped by.
    return torch.optim.AdamW(
        [{"params": decays}, {"params": others, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1, eps=1e-5
    )


def native(kind: str, steps: int, micro: int = 4) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and weights of plain PyTorch, over the whole batch in `micro` parts."""
    model = MODELS[kind]()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    losses, norms = [], []
    for batch in batches(steps):
        loss = 0.0
        for at in range(micro):
            rows = len(batch["input_ids"]) // micro
            part = {name: each[at * rows : (at + 1) * rows] for name, each in batch.items()}
            mine = model(**part).loss / micro
            mine.backward()
            loss += float(mine.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, norms, {name: each.detach() for name, each in model.state_dict().items()}


def accelerator(**options: Any) -> Any:
    """`strategy` other than megatron takes no options."""
    cuda_on_cpu.install()
    with quiet():
        import megatron.core.optimizer  # noqa: F401 - warns of what it does not find
    from accel_core import Accelerator
    from accel_megatron import MegatronLMPlugin

    precision, strategy = options.pop("mixed_precision", "no"), options.pop("strategy", "megatron")
    handlers = options.pop("kwargs_handlers", [])
    sizes = options.pop("parallelism_config", None)
    plugins = [MegatronLMPlugin(**options)] if strategy == "megatron" else []
    return Accelerator(
        device="cpu",
        strategy=strategy,
        mixed_precision=precision,
        plugins=plugins,
        kwargs_handlers=handlers,
        parallelism_config=sizes,
    )


def train(kind: str, steps: int, options: dict[str, Any], micro: int = 4, by_model: bool = False) -> Any:
    """The same under megatron; each reader has its part of the batch."""
    ours = accelerator(**options)
    model = MODELS[kind](seed=3 + ours.process_index)  # rank 0's count
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, scheduler = ours.prepare(model, optimizer, scheduler)
    topology = ours.run.topology
    losses, norms = [], []
    for batch in batches(steps):
        rows = len(batch["input_ids"]) // micro // topology.readers
        parts = [
            {
                name: each[(at * topology.readers + topology.reader) * rows :][:rows]
                for name, each in batch.items()
            }
            for at in range(micro)
        ]
        if by_model:
            whole = {name: torch.cat([part[name] for part in parts]) for name in batch}
            loss = model(**whole).loss
            ours.backward(loss)
        else:
            loss = ours.forward_backward(
                model, parts, lambda m, b: (m(**b).loss, None), microbatches=micro
            ).loss
        norms.append(float(ours.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(ours.reduce(loss.detach(), reduction="mean")))
    weights = {name: each.clone() for name, each in ours.get_state_dict(model, rank0_only=False).items()}
    ours.end_training()
    return losses, norms, weights


def go_on(kind: str, options: dict[str, Any], folder: str, first: int, last: int) -> Any:
    """Steps `first` to `last` of one training, from and into checkpoints of `folder`."""
    ours = accelerator(**options)
    model = MODELS[kind](seed=first)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model, optimizer, scheduler = ours.prepare(model, optimizer, scheduler)
    if first:
        ours.load_state(f"{folder}/{first}")
    topology, micro, losses = ours.run.topology, 4, []
    for each in batches(last)[first:]:
        # As many tokens count in each part: the mean of means is that of all.
        batch = {"input_ids": each["input_ids"], "labels": each["input_ids"]}
        rows = len(batch["input_ids"]) // micro // topology.readers
        parts = [
            {
                name: each[(at * topology.readers + topology.reader) * rows :][:rows]
                for name, each in batch.items()
            }
            for at in range(micro)
        ]
        loss = ours.forward_backward(model, parts, lambda m, b: (m(**b).loss, None), microbatches=micro).loss
        ours.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(ours.reduce(loss.detach(), reduction="mean")))
    ours.save_state(f"{folder}/{last}")
    rates = [group["lr"] for group in optimizer.param_groups]
    ours.end_training()
    return losses, rates


def write_indexed_text(folder: str) -> None:
    with quiet():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(f"{folder}/text.bin")
        for document in range(40):
            builder.add_document(torch.arange(30) % (VOCABULARY - 2) + document % 2, [30])
        builder.finalize(f"{folder}/text.idx")
