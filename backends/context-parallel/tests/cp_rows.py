"""Rows of several documents, windows and padding, of models of transformers: in one process, and shared."""

from __future__ import annotations

import warnings

import torch
from cp_problem import LENGTH, VOCABULARY, accelerator_of, complaint
from cp_traffic import Reads
from torch.utils.data import DataLoader

from accel_core import AccelError

ENDS = (5, 11, LENGTH)
STARTS = (0, 5, 11)
SAMPLES = 8


def model_of(kind):
    """Return a model that attends to all tokens before, or to a window of them, or in both directions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers imports
        from transformers import (
            BertConfig,
            BertForMaskedLM,
            LlamaConfig,
            LlamaForCausalLM,
            MistralConfig,
            MistralForCausalLM,
            Qwen2Config,
            Qwen2ForCausalLM,
        )

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": 4, "pad_token_id": None}
    grouped = sizes | {"num_key_value_heads": 2, "use_cache": False}
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**grouped, sliding_window=4))
    if kind == "mixed":
        some = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        return Qwen2ForCausalLM(Qwen2Config(**grouped, **some))
    if kind == "bidirectional":
        config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return BertForMaskedLM(config)
    return LlamaForCausalLM(LlamaConfig(**grouped))


def rows_of(data):
    """Return samples: whole rows, documents packed into rows, or rows with padding on a side."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    for number, row in enumerate(rows):
        if data in {"packed", "boundaries"}:
            row["labels"][list(STARTS)] = -100  # as transformers' collator does
            row["position_ids"] = torch.cat([torch.arange(n) for n in (5, 6, LENGTH - 11)])
        if data in {"left", "right"}:
            mask = torch.ones(LENGTH, dtype=torch.long)
            where = slice(0, number % 5) if data == "left" else slice(LENGTH - number % 5, None)
            mask[where], row["labels"][where] = 0, -100
            row["attention_mask"] = mask
    return rows


def summed(model, batch):
    """Return the sum of the losses of a batch's tokens: shifted by one, as causal models do."""
    given = {name: each for name, each in batch.items() if name not in {"labels", "shift_labels"}}
    logits = model(**given).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum"
    )


def shifted(rows):
    for row in rows:
        row["shift_labels"] = row.pop("labels").roll(-1)
        row["shift_labels"][-1] = -100
    return rows


def plain(kind, data):
    """Return (losses, a weight) of transformers in one process."""
    model, losses = model_of(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in DataLoader(shifted(rows_of(data)), 1 if data == "boundaries" else 2):
        loss = summed(model, batch) / (batch["shift_labels"] != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, next(model.parameters()).detach().clone()


def with_boundaries(batch):
    """Return the batch with the starts of its documents instead of positions."""
    starts = torch.tensor([*STARTS, LENGTH], dtype=torch.int32)
    del batch["position_ids"]
    return {**batch, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}


def collate(rows, data):
    batch = torch.utils.data.default_collate(rows)
    return with_boundaries(batch) if data == "boundaries" else batch


def shared(kind, data, form="loader", strategy="ddp", checkpointing=False):
    """The same under context parallelism: batches shared out by the loader, or by the loop."""
    from functools import partial

    entries = ("input_ids", "shift_labels", "position_ids", "attention_mask")
    buffers = dict.fromkeys(entries, 1) if form == "loader" else {}
    accelerator = accelerator_of(strategy, size=2, buffers=buffers)
    model = model_of(kind)
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows = 1 if data == "boundaries" else 2
    loader = DataLoader(shifted(rows_of(data)), rows, collate_fn=partial(collate, data=data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        counted = accelerator.reduce((batch["shift_labels"] != -100).sum(), "sum")
        whole = counted if form == "loader" else counted / 2  # each rank has counted the whole batch
        if form == "loader":
            around = accelerator.accumulate(model, batch=batch)
        else:
            parts = [batch[name] for name in entries if name in batch]
            around = accelerator.maybe_context_parallel(parts, [1] * len(parts), set(parts))
        with around:
            loss = summed(model, batch) * 2 / whole  # gradients are averaged over the two ranks
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = accelerator.get_state_dict(model, rank0_only=False)
    found = losses, next(iter(weights.values())).detach().clone()
    accelerator.end_training()
    return found


CASES = [
    ("causal", "packed", "loader"),
    ("causal", "packed", "by hand"),
    ("causal", "boundaries", "loader"),
    ("window", "whole", "loader"),
    ("window", "packed", "loader"),
    ("mixed", "left", "loader"),
    ("causal", "left", "by hand"),
    ("causal", "right", "loader"),
    ("bidirectional", "right", "loader"),
    ("bidirectional", "whole", "loader"),
]


def cases():
    """Train all cases in one process group: importing transformers takes longer than training."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = {case: outcome(*case) for case in CASES}
    found["checkpointed"] = outcome("window", "packed", "loader", "ddp", True)
    found["reads"] = reads_of_a_microbatch()
    found["refused"] = refused()
    dist.destroy_process_group()
    return found


def reads_of_a_microbatch():
    """Return the numbers that the host reads in the second micro-batch of a causal model."""
    accelerator = accelerator_of(size=2, buffers={"input_ids": 1})
    model, loader = accelerator.prepare(model_of("causal"), DataLoader(rows_of("whole"), 2))
    batches = iter(loader)
    for _ in range(2):
        with Reads() as reads:
            batch = next(batches)
            with accelerator.accumulate(model, batch=batch):
                accelerator.backward(model(input_ids=batch["input_ids"]).logits.sum())
    accelerator.end_training()
    return reads.places


def refused():
    """Return the errors of models and batches that cp does not serve."""
    found = {}
    for name, change in {
        "eager": lambda model: model.set_attn_implementation("eager"),
        "chunked": lambda model: setattr(model.config, "layer_types", ["chunked_attention"] * 2),
    }.items():
        accelerator, model = accelerator_of(size=2), model_of("causal")
        change(model)
        found[name] = complaint(accelerator.prepare, model)
        accelerator.end_training()
    accelerator = accelerator_of(size=2, buffers={"input_ids": 1, "position_ids": 1})
    model, loader = accelerator.prepare(model_of("causal"), DataLoader(rows_of("packed"), 2))
    batch = next(iter(loader))
    with accelerator.accumulate(model, batch=batch):
        own = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"].clone()}
        found["positions of its own"] = complaint(lambda: model(**own))
        blocks = {"input_ids": batch["input_ids"], "attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}
        found["a mask of blocks"] = complaint(lambda: model(**blocks))
        accelerator.backward(model(input_ids=batch["input_ids"]).logits.sum())
    accelerator.end_training()
    return found


def outcome(*case):
    try:
        return shared(*case)
    except AccelError as error:
        return str(error)
