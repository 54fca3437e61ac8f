"""A small language model trained by `forward_backward`, in one process or as a pipeline."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from datetime import timedelta

import torch
from fsdp_problem import sized
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accel_core import Accelerator, AccelError, InitProcessGroupKwargs, TorchDynamoPlugin
from accel_fsdp import TorchTensorParallelPlugin
from accel_testing import Traffic
from accel_testing.patience import patience

VOCABULARY, LENGTH, WIDTH = 18, 8, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        queries, keys, values = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, layers=4, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.where = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.where(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Muddled(Gpt):
    """Registers its head before its blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = self._modules.pop("blocks")


class Bare(Gpt):
    """Has a weight of its own, beside its modules."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Counted(Gpt):
    """Has state that is neither a parameter nor a buffer."""

    def get_extra_state(self):
        return {"calls": 3}


class Skipping(Gpt):
    """Adds what it began with to what its blocks give."""

    def forward(self, ids):
        first = self.tokens(ids)
        x = first
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + first))


class Towers(Gpt):
    """Half of its blocks begin where the others do."""

    def forward(self, ids):
        first = self.tokens(ids)
        self.blocks[1](self.blocks[0](first))
        return self.head(self.norm(self.blocks[3](self.blocks[2](first))))


class InPlace(Gpt):
    """Scales its embeddings in place, and asks them for shapes."""

    def forward(self, ids):
        x = self.tokens(ids)
        x *= 2.0
        x += self.where(torch.arange(ids.shape[1], device=x.device))
        bias = torch.zeros_like(x) + x.new_ones(())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + bias))


class Measured(Gpt):
    """Scales its logits by the largest of its embeddings."""

    def forward(self, ids):
        x = self.tokens(ids)
        scale = x.abs().max().item()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * scale


class Copied(Gpt):
    """Adds its embeddings, moved on by one place."""

    def forward(self, ids):
        x = self.tokens(ids)
        before = torch.zeros_like(x)
        before[:, 1:].copy_(x[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + before))


class Triple(Block):
    def forward(self, x):
        return super().forward(x), None, None


class Several(Gpt):
    """Layers that give several values, as those of encoder-decoders do."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Triple() for _ in range(4))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x, _, _ = block(x)
        return self.head(self.norm(x))


class Pair(Block):
    def forward(self, pair):
        return super().forward(pair[0]), pair[1]


class Paired(Gpt):
    """Activations are pairs of tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, ids):
        pair = self.tokens(ids), self.where(torch.arange(ids.shape[1]))
        for block in self.blocks:
            pair = block(pair)
        return self.head(self.norm(pair[0]))


class ByKeyword(Gpt):
    """Activations are no positional argument."""

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x=x)
        return self.head(self.norm(x))


class Recomputed(Gpt):
    """Computes its blocks again in backward, from what it scales between them."""

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x * 0.5, use_reentrant=False)
        return self.head(self.norm(x))


class Transposed(Gpt):
    """Its activations are not contiguous."""

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x).mT.contiguous().mT
        return self.head(self.norm(x))


class Listed(nn.Sequential):
    """Its blocks are one module that is called, with a backward hook."""

    def __init__(self):
        super().__init__(nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(Block() for _ in range(4))))
        self[1].register_full_backward_hook(lambda module, inputs, outputs: None)


class Scaled(Gpt):
    """A hook of the model scales its logits."""

    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, inputs, logits: 3 * logits)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.weight


class Sequence(nn.Sequential):
    """Modules with names; a weight of the first stage has no dimension."""

    def __init__(self):
        super().__init__(OrderedDict(scale=Scale(), body=nn.Linear(2, 2), head=nn.Linear(2, 2)))


class LookedUp(Gpt):
    """The first stage's gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.tokens.sparse = True


class Repeated(Gpt):
    """Norms with one module in all blocks."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.norm = self.blocks[0].norm


class Heard(Block):
    def forward(self, x):
        self.dtype = x.dtype
        return super().forward(x)


class Named(Gpt):
    pp_split_points = ("blocks.1",)


def window(step, microbatches=4, rows=2, length=LENGTH):
    """The micro-batches of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (microbatches, rows, length + 1), generator=generator)
    return [{"ids": each[:, :-1], "targets": each[:, 1:]} for each in ids]


def loss_of(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), logits.argmax(-1)


def accelerator_of(mixed_precision=None, split=None, dynamo=None, **options):
    """A pipeline of two ranks; without options one process that has all. `split`: how layers are split."""
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(40)))
    given = [limit] if dynamo is None else [limit, dynamo]
    if split is not None:
        given.append(TorchTensorParallelPlugin(tp_size=2, **split))
    if options:
        given += sized(**{"pp": 2, **options})
    return Accelerator(cpu=True, plugins=given, mixed_precision=mixed_precision)


def mine_of(batches, accelerator):
    """What this reader has of each micro-batch."""
    reader, readers = accelerator.run.topology.reader, accelerator.run.topology.readers
    return [{key: value[reader::readers] for key, value in batch.items()} for batch in batches]


def train(accelerator, model, optimizer, steps):
    losses, norms = [], []
    for step in steps:
        batches = mine_of(window(step), accelerator)
        found = accelerator.forward_backward(model, batches, loss_of, microbatches=4)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(found.loss, "mean").item())
    return losses, norms


def trained(kind, options, steps=50):
    accelerator = accelerator_of(**options)
    model = kind()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses, norms = train(accelerator, model, optimizer, range(steps))
    held = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    weights = {name: tensor.clone() for name, tensor in accelerator.iter_weights(model)}
    batches = mine_of(window(99, 2), accelerator)
    seen = accelerator.forward_backward(model, batches, loss_of, microbatches=2, forward_only=True)
    accelerator.end_training()
    return {
        "losses": losses,
        "norms": norms,
        "weights": weights,
        "held": held,
        "evaluated": seen.loss.item(),
        "outputs": [each.shape for each in seen.outputs],
    }


def scaled_later(options, steps=3):
    """Losses of a model with hooks that scale its logits, put on it after `prepare`, and their gradients."""
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # as ids require no gradient
    accelerator = accelerator_of(**options)
    model = Gpt()
    model.register_full_backward_pre_hook(lambda module, gradients: (2 * gradients[0],))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_forward_hook(lambda module, inputs, logits: 3 * logits)
    losses, _ = train(accelerator, model, optimizer, range(steps))
    accelerator.end_training()
    return losses


def trained_by_two_windows(options, steps=3):
    """Norms of gradients that are clipped after each window, and applied after each second."""
    accelerator = accelerator_of(**options)
    model = Gpt(tied=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    norms = []
    for step in range(2 * steps):
        batches = mine_of(window(step), accelerator)
        accelerator.forward_backward(model, batches, loss_of, microbatches=4)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return norms


def saved(options, folder, steps=3, tied=False):
    """Losses after a save."""
    accelerator = accelerator_of(**options)
    model = Gpt(tied=tied)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train(accelerator, model, optimizer, range(steps))
    accelerator.save_state(folder)
    losses, _ = train(accelerator, model, optimizer, range(steps, 2 * steps))
    accelerator.end_training()
    return losses


def resumed(options, folder, steps=3, tied=False):
    """Losses after a load, from other weights."""
    accelerator = accelerator_of(**options)
    model = Gpt(tied=tied)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    accelerator.load_state(folder)
    losses, _ = train(accelerator, model, optimizer, range(steps, 2 * steps))
    accelerator.end_training()
    return losses


def staged(options, steps=2):
    """Losses, how many modules are sharded, and what is said when the model is prepared again."""
    accelerator = accelerator_of(**options)
    model = Gpt()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses, norms = train(accelerator, model, optimizer, range(steps))
    sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
    accelerator.free_memory()
    said = complaint(accelerator.prepare, model)
    accelerator.end_training()
    return losses, norms, sharded, said


def sent():
    """The dtype in which the last stage gets activations, where stages are sharded, in bfloat16."""
    accelerator = accelerator_of("bf16", pp=2)
    model = Gpt()
    model.blocks[2] = Heard()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.forward_backward(model, mine_of(window(0), accelerator), loss_of, microbatches=4)
    accelerator.end_training()
    return str(getattr(model.blocks[2], "dtype", None))


def complaint(function, *args, **options):
    try:
        function(*args, **options)
    except (AccelError, RuntimeError) as error:  # a rank's partner may have ended with an error of its own
        return str(error)
    return "nothing"


def unprepared(kind, options):
    """What is said when the model is prepared, or run for the first time."""
    accelerator = accelerator_of(**options)
    model = kind()

    def run():
        prepared = accelerator.prepare(model)
        accelerator.forward_backward(prepared, window(0), loss_of, microbatches=4)

    said = complaint(run)
    accelerator.end_training()
    return said


def hooked_with_an_input_that_requires_a_gradient(options):
    """What is said of a hook of the whole model."""
    accelerator = accelerator_of(**options)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    model = accelerator.prepare(model)

    def loss_of_leaf(model, x):
        return model(x.requires_grad_()).sum(), None

    batches = [torch.ones(2, 6) for _ in range(4)]
    said = complaint(lambda: accelerator.forward_backward(model, batches, loss_of_leaf, microbatches=4))
    accelerator.end_training()
    return said


def tied():
    return Gpt(tied=True)


def built_on_meta(options):
    """Losses, how much this rank holds, and whole weights that began without storage."""
    accelerator = accelerator_of(**options)
    with accelerator.model_init_context():
        model = Gpt()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses, _ = train(accelerator, model, optimizer, range(2))
    held = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    weights = {name: tensor.clone() for name, tensor in accelerator.iter_weights(model)}
    accelerator.end_training()
    return losses, held, weights


def normed(options):
    """Buffers and the next random number after two steps of a model that norms batches and drops units."""
    accelerator = accelerator_of(**options)
    torch.manual_seed(0)
    halves = [[nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)] for _ in range(2)]
    model = nn.Sequential(*halves[0], *halves[1])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        accelerator.forward_backward(
            model, [torch.ones(4, 6)] * 2, lambda model, x: (model(x).sum(), None), microbatches=2
        )
        drawn.append(torch.rand(()).item())
        optimizer.zero_grad()
    counts = {name: each.tolist() for name, each in model.named_buffers() if not each.is_meta}
    accelerator.end_training()
    return counts, drawn


def noised(options, also_after=False, every=1):
    """Losses of a model that is to give back the noise in its input; all the noise that this rank drew.

    also_after: the loss draws once more after the model's call. every: micro-batches from one with noise to
    the next.
    """
    accelerator = accelerator_of(**options)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0), nn.Tanh()) for _ in range(4)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn, losses = set(), []

    def loss_of_noise(model, x):
        noise = torch.zeros(x.shape) if x[0, 0] % every else torch.randn(x.shape)
        drawn.add(noise.sum().item())
        found = model(x + noise)
        weight = 1.0 + torch.rand(()) if also_after else 1.0
        return weight * (found - noise).square().mean(), None

    for _ in range(3):
        batches = [torch.full((2, 6), float(number)) for number in range(4)]
        losses.append(accelerator.forward_backward(model, batches, loss_of_noise, microbatches=4).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return losses, drawn


def begun_apart(options, folder):
    """The loss of tied models that each rank has drawn anew; what is in the file that they are saved to."""
    accelerator = accelerator_of(**options)
    model = Gpt(tied=True)
    with torch.no_grad():
        model.tokens.weight.normal_(generator=torch.Generator().manual_seed(accelerator.process_index))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = accelerator.forward_backward(model, window(0), loss_of, microbatches=4).loss.item()
    accelerator.save_model(model, folder)
    accelerator.end_training()
    return found, load_file(f"{folder}/model.safetensors")


def counted(options, steps=8):
    """Losses a token that counts, norms and weights, where micro-batches have any number of such tokens.

    In float64, by SGD: sums in another order make no steps of their own.
    """
    accelerator = accelerator_of(**options)
    model = Gpt(tied=True).double()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    losses, norms = [], []
    for step in range(steps):
        batches = mine_of([ragged(batch, number) for number, batch in enumerate(window(step))], accelerator)
        (counted,) = accelerator.windows(batches, model, items=lambda b: (b["targets"] >= 0).sum(), size=4)
        found = accelerator.forward_backward(model, counted, sum_of)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(found.loss, "mean").item())
    weights = {name: tensor.clone() for name, tensor in accelerator.iter_weights(model)}
    accelerator.end_training()
    return {"losses": losses, "norms": norms, "weights": weights}


def counted_plainly(steps=8):
    """The same in one batch a step, whose loss is a mean."""
    model = Gpt(tied=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for step in range(steps):
        parts = [ragged(batch, number) for number, batch in enumerate(window(step))]
        loss, _ = loss_of(model, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def ragged(batch, number):
    """The batch with fewer targets that count, and none at all in the second."""
    targets = batch["targets"].clone()
    targets[0, (1 + 2 * number) :] = -100
    targets[1:, (0 if number == 1 else 7) :] = -100
    return {**batch, "targets": targets}


def sum_of(model, batch):
    logits = model(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten(), reduction="sum"), None


def halved():
    """The loss of a model that is of bfloat16 altogether."""
    accelerator = accelerator_of(pp=2)
    model = Gpt().bfloat16()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = accelerator.forward_backward(model, window(0), loss_of, microbatches=4).loss.item()
    accelerator.end_training()
    return found


def short(schedule, microbatches):
    """The loss of a window of few micro-batches; what is said where torch's schedule cannot have so many."""
    accelerator = accelerator_of(pp=2, pp_schedule=schedule)
    model = Gpt()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    try:
        found = accelerator.forward_backward(
            model, window(0, microbatches), loss_of, microbatches=microbatches
        ).loss.item()
    except AccelError as error:
        found = str(error)
    accelerator.end_training()
    return found


def shrunk(options):
    """The weights after a window of two micro-batches and one of a single one; both ranks read the same."""
    accelerator = accelerator_of(**options) if options else Accelerator(cpu=True)
    model = Gpt()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, microbatches in enumerate((2, 1, 2)):
        batches = window(number, microbatches)
        accelerator.forward_backward(model, batches, loss_of, microbatches=microbatches)
        optimizer.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model, rank0_only=False)
    accelerator.end_training()
    return weights


def misused():
    """What is said of calls that a pipeline cannot do."""
    accelerator = accelerator_of(pp=2)
    model = Gpt()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    batch = window(0)[0]
    loss = torch.ones((), requires_grad=True)
    one, other = Gpt(), Gpt()
    both = [*one.parameters(), *other.parameters()]
    uneven = [*window(0)[:3], *window(0, 1, rows=1)]
    found = {
        "call": complaint(model, batch["ids"]),
        "backward": complaint(accelerator.backward, loss),
        "shapes": complaint(accelerator.forward_backward, model, uneven, loss_of, microbatches=4),
        "two": complaint(accelerator.prepare, one, other, torch.optim.AdamW(both)),
        "whole": complaint(lambda: accelerator.full_parameters(model).__enter__()),
    }
    accelerator.end_training()
    return found


def interrupted():
    """What is said of the window after one that the user's loss has left."""
    accelerator = accelerator_of(pp=2)
    model = Gpt()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer, [0])
    batches = window(1)

    def raising(model, batch):
        if batch is batches[2]:
            raise RuntimeError("of the user")
        return loss_of(model, batch)

    complaint(accelerator.forward_backward, model, batches, raising, microbatches=4)
    optimizer.zero_grad()
    found = complaint(accelerator.forward_backward, model, window(2), loss_of, microbatches=4)
    accelerator.end_training()
    return found


def reductions(options, counts):
    """How many reductions a step takes, for each number of micro-batches."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torchs

    calls = []
    foreach_reduce = torchs.foreach_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return foreach_reduce(*args, **kwargs)

    torchs.foreach_reduce = counted
    accelerator = accelerator_of(**options)
    model = Gpt()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for microbatches in counts:
        for step in range(2):  # torch rehearses in the first
            calls.clear()
            batches = mine_of(window(step, microbatches), accelerator)
            accelerator.forward_backward(model, batches, loss_of, microbatches=microbatches)
            optimizer.step()
            optimizer.zero_grad()
        found.append(len(calls))
    return found


def gathers(options, microbatches):
    """How many all-gathers a window takes, its loss, and what `explain` has of stages and groups."""
    accelerator = accelerator_of(**options)
    model = Gpt(8)
    model._no_split_modules = ["Block"]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):  # torch rehearses in the first
        batches = mine_of(window(step, microbatches), accelerator)
        with Traffic() as seen:
            loss = accelerator.forward_backward(model, batches, loss_of, microbatches=microbatches).loss
        optimizer.step()
        optimizer.zero_grad()
    lines = [line.strip() for line in accelerator.explain().splitlines()]
    accelerator.end_training()
    return seen.kinds().get("all_gather", (0, 0))[0], loss.item(), lines


def compiled(layers):
    """Compiled modules of each kind, and graphs, of blocks that are compiled alone."""
    from torch._dynamo.utils import counters

    # dynamo reads it of gathered weights
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = accelerator_of(pp=2, dynamo=dynamo)
    model = Gpt(layers)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer, [0])
    kinds = {type(part).__name__ for part in model.modules() if part._compiled_call_impl is not None}
    return kinds, counters["stats"]["unique_graphs"]
