"""Strategies that break one promise each, over one that keeps them all."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import nn
from torch.utils._pytree import tree_map_only

from accel_core import (
    Mesh,
    MeshDim,
    OptimizerState,
    StepOutput,
    Topology,
    flat_range,
    full_leaf,
    hooks,
    implements,
)


class Averages:
    """Rank 0's weights at the start, gradients averaged at the end of a window. Nothing broken."""

    below: Any
    operation = "mean"

    def __init__(self, config, run):
        self.run = run

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        if self.run.world.size > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    self.run.collectives("world").broadcast(tensor)
        return model

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        self.reduce(unit)

    def reduce(self, unit):
        if self.run.world.size > 1:
            for parameter in unit.named_parameters().values():
                if parameter.requires_grad:
                    if parameter.grad is None:  # other ranks may have one
                        parameter.grad = torch.zeros_like(parameter)
                    self.run.collectives("world").all_reduce(parameter.grad, self.operation)


class AsksForASetting(Averages):
    """Runs with one setting only, that the kit has to be given."""

    @implements(hooks.refuse)
    def refuse(self, config):
        return [] if config.data.use_seedable_sampler else ["set data.use_seedable_sampler=true"]


class IgnoresItems(Averages):
    """Has each loss divided by the number of micro-batches, whatever it is a sum of."""

    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        window = unit.window
        self.below.backward(unit, loss * (window.divisor / window.size), boundary, options)


class FlipsBatches(Averages):
    """Gives the samples of each batch in the opposite order."""

    @implements(hooks.place_batch)
    def place_batch(self, unit, batch, device):
        return tree_map_only(torch.Tensor, lambda tensor: tensor.flip(0), batch)


class SchedulesPerProcess(Averages):
    @implements(hooks.after_step)
    def after_step(self, unit, optimizer, applied):
        for scheduler in unit.schedulers:
            for _ in range(self.run.world.size - 1):
                scheduler.step()


class DividesTwice(Averages):
    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        self.below.backward(unit, loss / unit.window.size, boundary, options)


class DividesLoopsTwice(Averages):
    """Runs whole windows rightly, and divides a loop's own losses once more."""

    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        self.below.backward(unit, loss / unit.window.size, boundary, options)

    @implements(hooks.forward_backward)
    def forward_backward(self, unit, batches, forward_loss, microbatches, forward_only):
        with unit.whole_window(batches, microbatches) as taken:
            found = [forward_loss(unit.wrapped[0], batch) for batch in taken]
            losses = torch.stack([loss for loss, _ in found]).sum() / unit.window.divisor
            if not forward_only:
                self.below.backward(unit, losses, True, {})
        return StepOutput(loss=losses.detach(), valid=True, outputs=tuple(output for _, output in found))


class ClipsAtOne(Averages):
    @implements(hooks.clip_gradients)
    def clip_gradients(self, unit, parameters, limit, norm_type):
        limit = limit if norm_type is None else 1.0
        return self.below.clip_gradients(unit, parameters, limit, norm_type)


class ClipsValuesLoosely(Averages):
    @implements(hooks.clip_gradients)
    def clip_gradients(self, unit, parameters, limit, norm_type):
        limit = 2 * limit if norm_type is None else limit
        return self.below.clip_gradients(unit, parameters, limit, norm_type)


class NeverUnscales(Averages):
    @implements(hooks.unscale)
    def unscale(self, unit, optimizer):
        return None


class DeniesSkips(Averages):
    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit, optimizer, closure):
        self.below.optimizer_step(unit, optimizer, closure)
        return True


class LeavesAutocast(Averages):
    @implements(hooks.autocast)
    def autocast(self, unit):
        return partial(torch.autocast, self.run.device.type, enabled=False)


class NeverRecomputes(Averages):
    @implements(hooks.checkpoint_function)
    def checkpoint_function(self, unit):
        return lambda function, *args: function(*args)


class RecomputesOtherwise(Averages):
    @implements(hooks.checkpoint_function)
    def checkpoint_function(self, unit):
        return partial(
            self.below.checkpoint_function(unit), context_fn=lambda: (nullcontext(), self.larger(unit))
        )

    @contextmanager
    def larger(self, unit):
        weight = next(unit.models[0].parameters()).data
        weight.mul_(2)
        try:
            yield
        finally:
            weight.div_(2)


class SumsWindows(Averages):
    @implements(hooks.forward_backward)
    def forward_backward(self, unit, batches, forward_loss, microbatches, forward_only):
        losses = []
        for _ in range(microbatches or unit.window.size):
            loss, _ = forward_loss(unit.wrapped[0], next(batches))
            unit.steps.backward(unit, loss, True, {})
            losses.append(loss.detach())
        return StepOutput(loss=torch.stack(losses).mean())


class CopiesOptimizers(Averages):
    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit, optimizer):
        parameters = [
            nn.Parameter(p.detach().clone()) for group in optimizer.param_groups for p in group["params"]
        ]
        return type(optimizer)(parameters, lr=optimizer.param_groups[0]["lr"])


class SumsGradients(Averages):
    operation = "sum"


class ShowsReducedGradients(Averages):
    """Right at the end of each window, and yet its tensor hooks change what others see."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        model = super().wrap_model(unit, model)
        for parameter in model.parameters():
            parameter.register_hook(partial(self.mean, unit, parameter))
        return model

    def mean(self, unit, parameter, gradient):
        before = 0 if parameter.grad is None else parameter.grad
        if unit.window.boundary and unit.run.accumulation is not None:
            return self.run.collectives("world").all_reduce(gradient + before, "mean") - before
        return gradient

    def reduce(self, unit):
        return None


class ReducesEachBatch(Averages):
    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        self.below.backward(unit, loss, boundary, options)
        self.reduce(unit)

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        return None


class OwnWeights(Averages):
    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        return model


class Whole(Mesh):
    def topology(self):
        return Topology(reader=0, readers=self.size("dp_replicate"))


class ReadsItAll(Averages):
    @implements(hooks.build_mesh)
    def build_mesh(self, dims, world):
        mesh = self.below.build_mesh([MeshDim("dp_replicate", world.size)], world)
        return mesh and Whole(mesh.dims, mesh.rank, mesh.device_mesh)


class GathersBackwards(Averages):
    @implements(hooks.collectives)
    def collectives(self, dim):
        return (
            Twisted(self.below.collectives(dim), "all_gather")
            if dim == "world"
            else self.below.collectives(dim)
        )


class TruncatesBroadcasts(Averages):
    @implements(hooks.collectives)
    def collectives(self, dim):
        return Twisted(self.below.collectives(dim), "broadcast")


class MeansAreSums(Averages):
    @implements(hooks.collectives)
    def collectives(self, dim):
        return Twisted(self.below.collectives(dim), "mean") if dim == "world" else self.below.collectives(dim)


class CutsLarge(Averages):
    @implements(hooks.collectives)
    def collectives(self, dim):
        return (
            Twisted(self.below.collectives(dim), "large") if dim == "world" else self.below.collectives(dim)
        )


class HearsItself(Averages):
    @implements(hooks.collectives)
    def collectives(self, dim):
        return Deaf(self.below.collectives(dim)) if dim == "control" else self.below.collectives(dim)


class Deaf:
    """A group in which each rank takes the others for its like."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def all_gather(self, tensor):
        return torch.cat([self.inner.all_gather(tensor).chunk(self.size)[self.rank]] * self.size)


class Twisted:
    """A group with one wrong operation."""

    def __init__(self, inner, wrong):
        self.inner, self.wrong = inner, wrong

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def all_gather(self, tensor):
        gathered = self.inner.all_gather(tensor)
        if self.wrong == "large" and tensor.numel() > 100_000:
            gathered[100_000:] = gathered[0]
        return torch.cat(gathered.chunk(self.size)[::-1]) if self.wrong == "all_gather" else gathered

    def broadcast(self, tensor, source=0):
        half = len(tensor) // 2 if self.wrong == "broadcast" and tensor.nbytes > 1 << 16 else None
        self.inner.broadcast(tensor if half is None else tensor[:half], source)
        return tensor

    def all_reduce(self, tensor, operation="sum"):
        return self.inner.all_reduce(tensor, "sum" if operation == self.wrong else operation)


class ClipsLocally(Averages):
    """Reduces in the optimizer's step, as lazy devices do, but lets clipping see local gradients."""

    @implements(hooks.reduce_gradients)
    def reduce_gradients(self, unit):
        return None

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit, optimizer, closure):
        self.reduce(unit)
        return self.below.optimizer_step(unit, optimizer, closure)


class KeepsItsWeights(Averages):
    @implements(hooks.average_parameters)
    def average_parameters(self, unit):
        for parameter in unit.named_parameters().values():
            parameter.data.add_(self.run.world.rank)


class GathersUnsaid(Averages):
    """Needs all ranks in each forward, as sharded weights do, and does not say so."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        model.register_forward_pre_hook(lambda *_: self.run.collectives("world").barrier())
        return super().wrap_model(unit, model)


class ExportsMaxima(Averages):
    """Its exported buffers are the largest of all ranks'."""

    @implements(hooks.iter_weights)
    def iter_weights(self, unit, dtype, to):
        for name, tensor in self.below.iter_weights(unit, dtype, to):
            if name in unit.named_parameters():
                yield name, tensor
            else:
                yield name, self.run.collectives("world").all_reduce(tensor.clone()[None], "max")[0]


class JoinsNobody(Averages):
    @implements(hooks.join)
    def join(self, units, even_batches):
        return nullcontext()

    @contextmanager
    def quiet(self):
        yield


def _memory(tensor):
    """The same storage as a tensor of that shape, row by row."""
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class ForgetsScalars(Averages):
    """Does not reduce weights without dimensions."""

    def reduce(self, unit):
        kept = {
            p: p.grad.clone() for p in unit.named_parameters().values() if not p.dim() and p.grad is not None
        }
        super().reduce(unit)
        for parameter, gradient in kept.items():
            parameter.grad.copy_(gradient)


class DrawsAlike(Averages):
    """Its ranks, which read different samples, begin with one seed."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        model.register_forward_pre_hook(self.draw)
        return super().wrap_model(unit, model)

    def draw(self, *_):
        torch.manual_seed(0)


class DrawsApart(Averages):
    """All ranks have the same activations, and each draws a number of its own before a forward's first."""

    @implements(hooks.mesh_dims)
    def mesh_dims(self, config, world):
        return [MeshDim("twin", -1, 150, "model", same_activations=True)]

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        for module in model.children():
            module.register_forward_pre_hook(self.draw)
        return super().wrap_model(unit, model)

    def draw(self, *_):
        torch.rand(self.run.world.rank, device=self.run.device)


class PermutesChannels(Averages):
    """Takes the memory of a gradient for its elements, row by row."""

    ndim = 4

    def reduce(self, unit):
        super().reduce(unit)
        for parameter in unit.named_parameters().values():
            if parameter.ndim == self.ndim and not parameter.is_contiguous():
                parameter.grad = _memory(torch.empty_like(parameter).copy_(parameter.grad)).clone()


class PermutesTransposed(PermutesChannels):
    ndim = 2


class UntiesItsModel(Averages):
    """Trains the weight of a layer that shares it as that layer's own."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        seen = set()
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in seen:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())
                seen.add(parameter)
        return super().wrap_model(unit, model)


class DescribesInPages(Averages):
    @implements(hooks.describe)
    def describe(self, unit):
        return ["one line\nand another"]


class UnwrapsByAttribute(Averages):
    """Takes any module with an attribute of that name for its wrapper."""

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit, model, keep_compiled):
        return self.below.unwrap_model(unit, getattr(model, "module", model), keep_compiled)


class UnwrapsAll(Averages):
    """Takes whatever it did not leave as it was for its wrapper."""

    @implements(hooks.unwrap_model)
    def unwrap_model(self, unit, model, keep_compiled):
        inner = model if model in unit.wrapped else model.module
        return self.below.unwrap_model(unit, inner, keep_compiled)


class NudgesWeights(Averages):
    """Has other weights between the batches of a window than in their forwards."""

    def __init__(self, config, run):
        super().__init__(config, run)
        self.kept = {}

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        model.register_forward_pre_hook(lambda *_: self.give_back())
        return super().wrap_model(unit, model)

    @implements(hooks.backward)
    def backward(self, unit, loss, boundary, options):
        self.below.backward(unit, loss, boundary, options)
        if not boundary:
            *_, last = unit.named_parameters().values()
            self.kept.setdefault(last, last.data.clone())
            last.data.mul_(1 + 2**-22)

    def give_back(self):
        for parameter, data in self.kept.items():
            parameter.data.copy_(data)
        self.kept.clear()


class KeepsNoLayers:
    """Forgets the layers below it, which it does not need itself."""

    below = property(lambda self: None, lambda self, layers: None)

    def __init__(self, config, run):
        self.run = run


class GathersLate(Averages):
    """Other ranks than the first have no weights before their first forward."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        super().wrap_model(unit, model)
        parameters = list(model.parameters()) if self.run.world.rank else []
        late = [(parameter, parameter.detach().clone()) for parameter in parameters]
        for parameter in parameters:
            parameter.data.zero_()

        def gather(*_):
            while late:
                parameter, data = late.pop()
                parameter.data.copy_(data)

        model.register_forward_pre_hook(gather)
        return model


class RemembersRuns(Averages):
    """Multiplies gradients by the number of runs that the process has had."""

    runs = 0

    def __init__(self, config, run):
        super().__init__(config, run)
        RemembersRuns.runs += 1
        self.factor = RemembersRuns.runs

    def reduce(self, unit):
        super().reduce(unit)
        for parameter in unit.named_parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)


class MixesRuns(RemembersRuns):
    """The same with the runs that are live."""

    @implements(hooks.run_ended)
    def run_ended(self):
        RemembersRuns.runs -= 1


class AddsWhatThereIs(Averages):
    """Reduces in one buffer the gradients that this rank has, whatever parameters the others' are of."""

    def reduce(self, unit):
        if self.run.world.size > 1:
            for parameter in unit.named_parameters().values():
                if parameter.grad is not None:
                    self.run.collectives("world").all_reduce(parameter.grad, self.operation)


# -- level 4


class RebuildsModules(Averages):
    """Puts classes of its own in place of modules', which keep parameters and buffers only."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        super().wrap_model(unit, model)
        kept = ("get_extra_state", "set_extra_state", "_save_to_state_dict", "_load_from_state_dict")
        for module in model.modules():
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: getattr(nn.Module, name) for name in kept})
        return model


class ForgetsItsOptimizer(Averages):
    """Does not offer what the optimizer keeps beside the state of parameters."""

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit, optimizer):
        return evolve(self.below.optimizer_state(unit, optimizer), own={})


class SavesMemory(Averages):
    """Offers the memory of weights as their elements, row by row."""

    @implements(hooks.model_state)
    def model_state(self, unit):
        found = dict(self.below.model_state(unit))
        for name, leaf in found.items():
            ((_, tensor),) = leaf.shards
            if not tensor.is_contiguous():
                found[name] = evolve(leaf, shards=((leaf.shards[0][0], _memory(tensor)),))
        return found


class LosesMomentum(Averages):
    """Does not offer the optimizer's state."""

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit, optimizer):
        return OptimizerState(leaves={}, groups=self.below.optimizer_state(unit, optimizer).groups)


class CountsAnew(Averages):
    """Goes on counting steps where nobody looks: what it offers after a load is what was loaded."""

    stale = None

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit, optimizer):
        found = self.below.optimizer_state(unit, optimizer)
        if self.stale is None:
            return found
        return OptimizerState(leaves={**found.leaves, **self.stale}, groups=found.groups, plain=found.plain)

    @implements(hooks.load_state)
    def load_state(self, unit):
        for optimizer in unit.optimizers:
            leaves = self.below.optimizer_state(unit, optimizer).leaves
            self.stale = {
                name: evolve(leaf, shards=tuple((at, tensor.clone()) for at, tensor in leaf.shards))
                for name, leaf in leaves.items()
                if name.endswith("/step")
            } or None


class OffersCopies(Averages):
    """Its leaves are no views of the live storage."""

    @implements(hooks.model_state)
    def model_state(self, unit):
        return {
            name: full_leaf(leaf.shards[0][1].clone()) for name, leaf in self.below.model_state(unit).items()
        }


class RenamesWeights(Averages):
    @implements(hooks.model_state)
    def model_state(self, unit):
        return {f"module.{name}": leaf for name, leaf in self.below.model_state(unit).items()}


class LosesAnElement(Averages):
    """Cut in pieces, one of them too short."""

    @implements(hooks.model_state)
    def model_state(self, unit):
        found = dict(self.below.model_state(unit))
        name, leaf = next((name, leaf) for name, leaf in found.items() if leaf.global_shape)
        data = leaf.shards[0][1]
        return {**found, name: flat_range(data.view(-1)[1:], data.shape, 1, replicated=True)}


class DriftsApart(Averages):
    """Replicas that are none: each rank's frozen weight is its own."""

    @implements(hooks.wrap_model)
    def wrap_model(self, unit, model):
        super().wrap_model(unit, model)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data += 1e-3 * self.run.world.rank
        return model


class HidesMasters(Averages):
    """Steps copies of its own, and after a load goes on from the ones it had."""

    def __init__(self, config, run):
        super().__init__(config, run)
        self.masters = {}

    @implements(hooks.optimizer_step)
    def optimizer_step(self, unit, optimizer, closure):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(self.masters.setdefault(parameter, parameter.data.clone()))
        applied = self.below.optimizer_step(unit, optimizer, closure)
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            self.masters[parameter].copy_(parameter.data)
        return applied

    @implements(hooks.wrap_optimizer)
    def wrap_optimizer(self, unit, optimizer):
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            self.masters[parameter] = parameter.detach().clone()
        return optimizer
