"""A small language model, trained by a plain loop and under context parallelism."""

from __future__ import annotations

import copy
import json
from datetime import timedelta

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accel_context_parallel import ContextParallelPlugin
from accel_context_parallel.sequence import positions
from accel_core import Accelerator, AccelError, InitProcessGroupKwargs, ParallelismConfig
from accel_testing.patience import patience

VOCABULARY, LENGTH, SAMPLES = 17, 16, 32


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.width, self.causal = width // heads, causal
        self.norm = nn.LayerNorm(width)
        self.queries, self.keys, self.values = (nn.Linear(width, width) for _ in range(3))
        self.out, self.mlp = nn.Linear(width, width), nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        normed = self.norm(x)
        mixed = [each(normed) for each in (self.queries, self.keys, self.values)]
        parts = [each.unflatten(-1, (-1, self.width)).transpose(1, 2) for each in mixed]  # a rank's heads
        attended = F.scaled_dot_product_attention(*parts, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Gpt(nn.Module):
    """Learnt positions, embeddings tied to the output."""

    def __init__(self, causal=True, width=16, layers=2, heads=2, length=LENGTH):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.where = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids, position_ids=None, **_):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = self.tokens(input_ids) + self.where(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples(length=LENGTH):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (SAMPLES, length + 1), generator=generator)
    return [{"input_ids": row[:-1], "targets": row[1:]} for row in ids]


class WithoutPositions(Gpt):
    """Counts them by itself: its forward takes none."""

    def forward(self, tokens):
        return super().forward(tokens)


class OfAnotherName(Gpt):
    def forward(self, tokens, where=None):
        return super().forward(tokens, where)


class Adapted(nn.Module):
    """Hands what it is given on to a model inside, as adapters do."""

    def __init__(self):
        super().__init__()
        self.inner = Gpt()

    def forward(self, *args, **options):
        return self.inner(*args, **options)


def loss_of(model, batch):
    logits = model(batch["input_ids"], batch.get("position_ids"))
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), None


def loss_of_tokens_alone(model, batch):
    """As a loop that leaves the positions to the model."""
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["targets"].flatten()), None


def plain(causal=True, batch_size=4, epochs=7):
    """(losses, weights) of an ordinary loop."""
    model = Gpt(causal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        for batch in DataLoader(samples(), batch_size):
            loss, _ = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, model.head.weight.detach().clone()


PATIENCE = timedelta(seconds=patience(30))
BUFFERS = {"input_ids": 1, "targets": 1}
SPLIT = {
    "ACCEL__PARALLELISM__TP": "2",
    "ACCEL__TENSOR_PARALLEL__PARALLELIZE_PLAN": json.dumps(
        {"blocks.*.queries": "colwise", "blocks.*.keys": "colwise", "blocks.*.values": "colwise"}
        | {"blocks.*.out": "rowwise"}
    ),
}


def accelerator_of(strategy="ddp", size=-1, buffers=BUFFERS, timeout=PATIENCE, **more):
    patience = InitProcessGroupKwargs(timeout=timeout)
    plugins = [ContextParallelPlugin(buffers=buffers), ParallelismConfig(cp=size), patience]
    return Accelerator(cpu=True, strategy=strategy, plugins=plugins, **more)


def ours(
    causal=True,
    batch_size=4,
    epochs=7,
    form="accumulate",
    accelerator=None,
    loss_of=loss_of,
    **options,
):
    """The same under context parallelism; losses are the mean over the ranks that have parts of them."""
    accelerator = accelerator or accelerator_of(**options)
    model = Gpt(causal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size))
    losses = []
    for _ in range(epochs):
        for batch in loader:
            if form == "by hand":
                where = torch.arange(LENGTH).repeat(len(batch["targets"]), 1)
                targets = batch["targets"]  # twice, as programs name one tensor `labels` and `shift_labels`
                shared = [batch["input_ids"], targets, where, targets]
                with accelerator.maybe_context_parallel(shared, [1, 1, 1, 1], {shared[0], where}):
                    loss, _ = loss_of(model, {**batch, "position_ids": where})
                    accelerator.backward(loss)
                assert batch["targets"].shape[1] == LENGTH
            elif form == "accumulate":
                with accelerator.accumulate(model, batch=batch):
                    loss, _ = loss_of(model, batch)
                    accelerator.backward(loss)
            else:
                loss = accelerator.forward_backward(model, [batch], loss_of, microbatches=1).loss
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weight = accelerator.get_state_dict(model, rank0_only=False)["head.weight"].detach().clone()
    shape = tuple(batch["input_ids"].shape)
    accelerator.end_training()
    return losses, weight, shape


def by_hand():
    return ours(form="by hand", buffers={})


def as_for_accelerate():
    """The same with Accelerate's own arguments, through accel-compat."""
    import accel_compat

    accel_compat.install()
    from accelerate import Accelerator as Theirs
    from accelerate import ParallelismConfig

    theirs = Theirs(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
    return ours(form="by hand", accelerator=theirs)


def without_positions(form):
    buffers = {} if form == "by hand" else BUFFERS
    return ours(form=form, epochs=3, loss_of=loss_of_tokens_alone, buffers=buffers)


def first_logits(model, derive, *names):
    """Return (logits of this rank's part of a batch, or the error; the rank)."""
    plugins = [ContextParallelPlugin(buffers=BUFFERS, derive=derive), ParallelismConfig(cp=2)]
    accelerator = Accelerator(cpu=True, strategy="ddp", plugins=plugins)
    model, loader = accelerator.prepare(model(), DataLoader(samples(), 4))
    batch, found = next(iter(loader)), []

    def step():
        with accelerator.accumulate(model, batch=batch):
            found.append(model(*(batch[name] for name in names)).detach())

    said = complaint(step)
    rank = accelerator.process_index
    accelerator.end_training()
    return (found or [said])[0], rank


def complaint(function, *args):

    try:
        function(*args)
    except AccelError as error:
        return str(error)
    return "nothing"


def mistakes():
    """What is said of each."""
    accelerator = accelerator_of(buffers={**BUFFERS, "position_ids": 1, "0": 1, "mask": 1})
    model, loader = accelerator.prepare(Gpt(), DataLoader(samples(), 4))
    batch = next(iter(loader))
    found = {"outside of a step": complaint(loss_of, model, batch)}

    def step(function):
        with accelerator.accumulate(model, batch=batch):
            function()

    found["part of a part"] = complaint(step, lambda: model(batch["input_ids"][:, 1:]))
    masked = torch.ones(4, 1, LENGTH // 2, LENGTH // 2).tril()
    found["mask"] = complaint(
        step, lambda: F.scaled_dot_product_attention(masked, masked, masked, attn_mask=masked)
    )
    mine = torch.randn(4, 1, 3, 4)
    found["keys of its own"] = complaint(step, lambda: F.scaled_dot_product_attention(mine, mine, mine))
    copied = {name: tensor.clone() for name, tensor in batch.items()}
    found["nobody's batch"] = complaint(lambda: accelerator.accumulate(model, batch=copied).__enter__())
    found["no attention"] = complaint(step, lambda: batch["input_ids"] + 1)
    found["shared twice"] = complaint(accelerator.maybe_context_parallel([batch["input_ids"]], [1]).__enter__)
    for name, rows in {
        "odd length": samples(LENGTH + 1),
        "two lengths": [{**row, "mask": torch.ones(LENGTH * 2)} for row in samples()],
        "documents": [{**row, "seq_idx": torch.zeros(LENGTH)} for row in samples()],
    }.items():
        found[name] = complaint(next, iter(accelerator.prepare(DataLoader(rows, 4))))
    accelerator.end_training()
    return found


def restarting():
    """Logits of this rank's part of rows whose positions restart, and what they are in one process."""
    rows = [{**row, "position_ids": torch.arange(LENGTH) % 8} for row in samples()]
    accelerator = accelerator_of(buffers={**BUFFERS, "position_ids": 1})
    model, loader = accelerator.prepare(Gpt(), DataLoader(rows, 4))
    batch = next(iter(loader))
    with accelerator.accumulate(model, batch=batch):
        logits = model(batch["input_ids"], batch["position_ids"]).detach()
    whole = next(iter(DataLoader(rows, 4)))
    expected = Gpt()(whole["input_ids"], whole["position_ids"]).detach()
    mine = positions(LENGTH, 2, logits.device)[accelerator.process_index]
    accelerator.end_training()
    return logits, expected[:, mine]


def unattentive():
    """What is said of a model without attention that is cut into stages."""
    accelerator = accelerator_of(strategy="fsdp", size=2)
    model = Gpt()
    for block in model.blocks:
        block.forward = block.mlp.forward
    model, loader = accelerator.prepare(model, DataLoader(samples(), 4))
    batch = next(iter(loader))
    said = complaint(lambda: accelerator.forward_backward(model, [batch], loss_of, microbatches=1))
    accelerator.end_training()
    return said


def evaluation():
    """Logits of a whole batch: as this rank has its part of them, and which of it that is."""
    accelerator = accelerator_of()
    model, loader = accelerator.prepare(Gpt(), DataLoader(samples(), 4))
    batch = next(iter(loader))
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["position_ids"])
    accelerator.end_training()
    return logits, batch["position_ids"]


def beside(strategy="ddp"):
    """Whether models see what they would see alone, while a batch is shared: prompts differ by rank."""
    accelerator = accelerator_of()
    models = [Gpt(causal=False), Gpt(), Gpt(causal=False)]
    encoder, policy = accelerator.prepare(models[0]), accelerator.prepare(models[1])
    loader = accelerator.prepare(DataLoader(samples(), 4))
    agree = []
    for batch in loader:
        with accelerator.accumulate(policy, batch=batch):
            loss, _ = loss_of(policy, batch)
            accelerator.backward(loss)
        generator = torch.Generator().manual_seed(accelerator.process_index)
        for length in (3, LENGTH // 2, LENGTH):
            prompt = torch.randint(VOCABULARY, (2, length), generator=generator)
            with torch.no_grad():
                for model, alone in ((encoder, models[2]), (policy, Gpt())):
                    agree.append(torch.equal(model(prompt), alone(prompt)))
        break
    copy.deepcopy(accelerator.unwrap_model(policy))
    accelerator.end_training()
    return agree


def recomputed():
    """Gradients where backward computes attention again."""
    from torch.utils.checkpoint import checkpoint

    accelerator = accelerator_of()
    model, loader = accelerator.prepare(Gpt(), DataLoader(samples(), 4))
    batch = next(iter(loader))
    found = []
    for again in (False, True):
        with accelerator.accumulate(model, batch=batch):
            loss = checkpoint(lambda: loss_of(model, batch)[0], use_reentrant=False) if again else 0
            accelerator.backward(loss if again else loss_of(model, batch)[0])
        found.append(accelerator.unwrap_model(model).blocks[0].queries.weight.grad.clone())
        model.zero_grad()
    accelerator.end_training()
    return found


def placed(batch, buffers):
    """What a batch that a loader would give becomes."""
    accelerator = accelerator_of(buffers=buffers)
    loader = accelerator.prepare(DataLoader([batch], batch_size=None))
    found = next(iter(loader))
    accelerator.end_training()
    return found


def ragged(length=LENGTH):
    """Samples of which few tokens count, and in some parts of sequences none."""
    rows = samples(length)
    for number, row in enumerate(rows):
        row["targets"] = row["targets"].clone()  # shares memory with the inputs
        row["targets"][: number % length] = -100
    return rows


def sum_of(model, batch):
    logits = model(batch["input_ids"], batch.get("position_ids"))
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")


def plain_of_tokens():
    """(losses a token, norms, weight) of means over the tokens of eight samples, in float64."""
    model = Gpt().double()
    optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.3), [], []
    for batch in DataLoader(ragged(), 8):
        loss = sum_of(model, batch) / (batch["targets"] != -100).sum()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.head.weight.detach().clone()


def ours_of_tokens(batch_size, form, **options):
    """The same in windows of two micro-batches, whose tokens each rank counts in its parts."""
    accelerator = accelerator_of(**options)
    model = Gpt().double()
    optimizer, losses, norms = torch.optim.SGD(model.parameters(), lr=0.3), [], []
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(ragged(), batch_size))
    for window in accelerator.windows(loader, model, items=lambda b: (b["targets"] != -100).sum(), size=2):
        total = window.items[1]
        if form == "forward_backward":
            output = accelerator.forward_backward(model, window, lambda m, b: (sum_of(m, b), None))
            losses.append(accelerator.reduce(output.loss, "mean").item())
        else:
            mine = torch.zeros((), dtype=torch.float64)
            for batch in window:
                loss = sum_of(model, batch)
                accelerator.backward(loss)
                mine += loss.detach()
            losses.append((accelerator.reduce(mine, "sum") / total).item())
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    weight = accelerator.get_state_dict(model, rank0_only=False)["head.weight"].detach().clone()
    accelerator.end_training()
    return losses, norms, weight


def llama(shared, left_out=()):
    """Losses of a transformers model on its own loss, whose tokens are counted over all ranks."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers imports
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"].clone()} for row in samples()]
    for row in rows[::2]:
        row["labels"][:5] = -100
    accelerator = accelerator_of(buffers={"input_ids": 1, "labels": 1}) if shared else Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 4))
    losses = []
    for window in accelerator.windows(loader, model, items=tokens):
        for batch in window:
            given = {name: each for name, each in batch.items() if name not in left_out}
            loss = model(**given, num_items_in_batch=1).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(torch.stack([loss.detach(), tokens(batch).float()]), "sum"))
    accelerator.end_training()
    return [(loss / items).item() for loss, items in losses]


def llama_that_shifts(form):
    """Train a step of a transformers model that is to shift its labels by itself; return what it raises."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what transformers imports
        from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    if form == "masked":
        config = BertConfig(**sizes, num_attention_heads=2, attn_implementation="sdpa")
        model = BertForMaskedLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    accelerator = accelerator_of(buffers={"input_ids": 1})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows = [{"input_ids": row["input_ids"]} for row in samples()]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 4))
    try:
        batch = next(iter(loader))
        with accelerator.accumulate(model, batch=batch):
            accelerator.backward(model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss)
    except AccelError as error:
        return str(error)
    finally:
        accelerator.end_training()


def tokens(batch):
    """Return how many of its tokens count; of a part of sequences that of this rank's."""
    following = batch.get("shift_labels")
    return ((batch["labels"][:, 1:] if following is None else following) != -100).sum()
