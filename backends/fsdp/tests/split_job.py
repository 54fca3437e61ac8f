"""What each rank of test_fsdp_split does: train layers that are split over ranks which share nothing else."""

from __future__ import annotations

import os

import grid_job
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel_core import Accelerator, AccelError
from accel_testing import Traffic

SPLIT = {"tp": 2}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"lr": 0.01, "eps": 1e-3}
KINDS = {"sgd": (torch.optim.SGD, SGD), "adamw": (torch.optim.AdamW, ADAMW)}


def frozen(model):
    """A layer that is split and a norm that is not get no gradient for the first half of the training."""
    for part in (model.blocks[0].up, model.norm):
        part.requires_grad_(False)


def thaw(model, step):
    if step == grid_job.STEPS // 2:
        model.requires_grad_(True)


def made(case):
    model, data = grid_job.model_and_data(case.get("model", "gpt"))
    if case.get("frozen"):
        frozen(model)
    kind, options = KINDS[case.get("optimizer", "sgd")]
    optimizer = kind(model.parameters(), **options, **case.get("options", {}))
    return model, optimizer, DataLoader(data, grid_job.BATCH)


def plain(case):
    """Losses, norms and weights of plain PyTorch in one process."""
    model, optimizer, loader = made(case)
    window, clip = case.get("window", 1), case.get("clip")
    losses, norms = [], []
    for step, (words, following) in enumerate(loader):
        if case.get("frozen"):
            thaw(model, step)
        loss = grid_job.loss_of(model, words, following)
        (loss / window).backward()
        losses.append(loss.item())
        if (step + 1) % window == 0:
            if clip:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            if case.get("clamp"):
                nn.utils.clip_grad_value_(model.parameters(), case["clamp"])
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.state_dict().items()}


def run_of(case):
    os.environ.update(
        grid_job.environment(case.get("sizes", SPLIT), case["plan"], **case.get("environment", {}))
    )
    os.environ["ACCEL__GRADIENT_ACCUMULATION_STEPS"] = str(case.get("window", 1))
    return Accelerator(cpu=True)


def trained(case):
    """The same by an Accelerator."""
    run = run_of(case)
    model, optimizer, loader = made(case)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    losses, norms = [], []
    for step, (words, following) in enumerate(loader):
        if case.get("frozen"):
            thaw(model, step)
        with run.accumulate(model, batch=(words, following)):
            if case.get("closure"):
                optimizer.step(lambda: closed(run, model, optimizer, words, following, losses))  # noqa: B023
                continue
            loss = grid_job.loss_of(model, words, following)
            if case.get("by_hand"):
                loss.backward()
            else:
                run.backward(loss)
            if case.get("clip") and run.sync_gradients:
                norms.append(run.clip_grad_norm_(model.parameters(), case["clip"]).item())
            if case.get("clamp") and run.sync_gradients:
                run.clip_grad_value_(model.parameters(), case["clamp"])
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    groups = [len(group["params"]) for group in optimizer.param_groups]
    weights = run.get_state_dict(model, rank0_only=False)
    sharded = sum(isinstance(module, FSDPModule) for module in model.modules())
    run.end_training()
    return losses, norms, weights, groups, sharded


def closed(run, model, optimizer, words, following, losses):
    optimizer.zero_grad()
    loss = grid_job.loss_of(model, words, following)
    run.backward(loss)
    losses.append(loss.item())
    return loss


def all_trained(cases):
    kept, found = dict(os.environ), {}
    for name, case in cases.items():
        found[name] = trained(case)
        os.environ.clear()
        os.environ.update(kept)
    return found


def sharded(plan, environment, hooked):
    """How many modules are sharded, and how many parameters are plain tensors."""
    run = run_of({"plan": plan, "environment": environment})
    model = grid_job.MODELS["gpt"]()
    if hooked:
        model.norm.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model = run.prepare(model)
    found = (
        sum(isinstance(module, FSDPModule) for module in model.modules()),
        sum(not isinstance(parameter, DTensor) for parameter in model.parameters()),
    )
    run.end_training()
    return found


def sent(plan):
    """All-reduces of one window of one micro-batch, and of one of three, by their sizes."""
    found = []
    for window in (1, 3):
        run = run_of({"plan": plan, "window": window})
        model, optimizer, loader = made({})
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        batches = [*loader]
        with Traffic() as seen:
            for words, following in batches[:window]:
                with run.accumulate(model):
                    run.backward(grid_job.loss_of(model, words, following))
                    optimizer.step()
                    optimizer.zero_grad()
        small = [size for kind, size in seen.calls if kind == "all_reduce" and size == 8 * 4]
        found.append((len(small), sorted({kind for kind, _ in seen.calls})))
        run.end_training()
    return found


def complete(plan):
    """Placements of gradients that differ from those of their parameters, before and after unscaling."""
    run = run_of({"plan": plan})
    model, optimizer, loader = made({})
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    words, following = next(iter(loader))
    run.backward(grid_job.loss_of(model, words, following))

    def differing():
        pairs = [(p.placements, p.grad.placements) for p in model.parameters() if isinstance(p, DTensor)]
        return sum(placed != of_gradient for placed, of_gradient in pairs)

    before = differing()
    run.unscale_gradients()
    found = before, differing()
    run.end_training()
    return found


def whole_weights(plan):
    """What is written to whole weights, or to a state dict, and counts."""
    run = run_of({"plan": plan})
    model = run.prepare(grid_job.MODELS["gpt"]())
    first = run.get_state_dict(model, rank0_only=False)
    for value in {id(value): value for value in first.values()}.values():
        value.add_(1)
    again = run.get_state_dict(model, rank0_only=False)
    found = {"state dict": {(first[name] - again[name]).mean().item() for name in first}}
    for writeback in (False, True):
        with run.full_parameters(model, writeback=writeback), torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.full(parameter.shape, 7.0))
        held = run.get_state_dict(model, rank0_only=False)
        found[f"writeback {writeback}"] = {bool((value == 7).all()) for value in held.values()}
    run.end_training()
    return found


def refused(plan):
    """What a second prepare says."""
    run = run_of({"plan": plan})
    given, *_ = made({})
    model = run.prepare(given)
    run.free_memory()
    try:
        run.prepare(model)
    except AccelError as error:
        return str(error)
    finally:
        run.end_training()


def in_groups():
    """A model, and an optimizer of two groups."""
    model, data = grid_job.model_and_data("gpt")
    named = dict(model.named_parameters())
    groups = [{"params": [named[key] for key in named if ("up" in key) is up]} for up in (True, False)]
    optimizer = torch.optim.SGD(groups, lr=0.0, momentum=0.9, foreach=True)
    return model, optimizer, DataLoader(data, grid_job.BATCH)


def grouped(plan, kind):
    """Sizes and rates of the groups that hooks and a closure of a step see, and the weights.

    A hook before the step gives each group its rate. Without a plan, by plain PyTorch.
    """
    run = run_of({"plan": plan}) if plan else None
    model, optimizer, loader = in_groups()
    inner, seen = optimizer, []
    if run:
        model, optimizer, loader = run.prepare(model, optimizer, loader)

    def look(*call):
        seen.append([(len(group["params"]), group["lr"]) for group in inner.param_groups])

    def rates(*call):
        for group, rate in zip(inner.param_groups, (0.1, 0.3), strict=False):
            group["lr"] = rate

    inner.register_step_pre_hook(rates)
    inner.register_step_post_hook(look)
    for words, following in loader:

        def closure(words=words, following=following):
            look()
            optimizer.zero_grad()
            loss = grid_job.loss_of(model, words, following)
            run.backward(loss) if run else loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    weights = run.get_state_dict(model, rank0_only=False) if run else dict(model.state_dict())
    if run:
        run.end_training()
    return seen, weights


class Held:
    """An output whose tensors torch does not find."""

    def __init__(self, logits):
        self.logits = logits


class Holding(grid_job.Gpt):
    """A model that gives its logits in an object."""

    def forward(self, words):
        return Held(super().forward(words))


def second_order(plan, kind):
    """What a gradient of gradients says: of the whole model, of a part, or of logits in an object."""
    run = run_of({"plan": plan})
    model = run.prepare(Holding() if kind == "object" else grid_job.Gpt())
    words = torch.zeros(2, grid_job.LENGTH, dtype=torch.int64)
    if kind == "part":
        given = model.blocks[0](torch.ones(2, grid_job.LENGTH, 8, requires_grad=True))
    else:
        given = model(words)
    try:
        getattr(given, "logits", given).sum().backward(create_graph=True)
    except AccelError as error:
        return str(error)
    finally:
        run.end_training()


def continued(case, folder, saves):
    """Train three steps and save, or load; give the losses of three more, and the last weights."""
    run = run_of(case)
    model, optimizer, _ = made(case)
    data = grid_job.model_and_data("gpt")[1]
    loader = DataLoader(data, grid_job.BATCH // run.run.topology.readers)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    if not saves:
        run.load_state(folder)
    losses = []
    for step, (words, following) in enumerate(loader):
        loss = grid_job.loss_of(model, words, following)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "mean").item())
        if saves and step == 2:
            run.save_state(folder)
            losses.clear()
    weights = run.get_state_dict(model, rank0_only=False)
    run.end_training()
    return losses, weights
