"""Devices that break one promise each."""

from __future__ import annotations

import warnings

import torch

from accel_core import RandomStream, hooks, implements
from accel_core.contract.spec import _impl_marker
from accel_testing.simulated.plugin import SimulatedDevice


class Sound(SimulatedDevice):
    """Nothing broken."""


class MisspeltHook(SimulatedDevice):
    @_impl_marker
    def synchronise(self, device):
        return None


class OnTheHost(SimulatedDevice):
    @implements(hooks.select_device)
    def select_device(self, world):
        return torch.device("cpu")


class ClaimsMore(SimulatedDevice):
    @implements(hooks.capabilities)
    def capabilities(self, device):
        return self.below.capabilities(device) | {"teleport"}


def _no_float8(*args, **kwargs):
    raise RuntimeError("this chip has no float8")


class ClaimsFloat8(SimulatedDevice):
    @implements(hooks.capabilities)
    def capabilities(self, device):
        torch._scaled_mm = _no_float8
        return self.below.capabilities(device) | {"fp8"}


class ForgetsBuffers(SimulatedDevice):
    @implements(hooks.place_model)
    def place_model(self, unit, model, device):
        buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.dim()}
        model.to(device)
        for name, buffer in buffers.items():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer)
        return model


class UntiesWeights(SimulatedDevice):
    @implements(hooks.place_model)
    def place_model(self, unit, model, device):
        model.to(device)
        seen = set()
        for child in model.modules():
            weight = getattr(child, "weight", None)
            if weight is not None and id(weight) in seen:
                child.weight = torch.nn.Parameter(weight.detach().clone())
            seen.add(id(weight))
        return model


class ForgetsSeeds(SimulatedDevice):
    """Seeds its stream with another number each time."""

    @implements(hooks.random_streams)
    def random_streams(self):
        return {"own": RandomStream(torch.get_rng_state, torch.set_rng_state, lambda seed: torch.seed())}


class LosesRandomness(SimulatedDevice):
    """Draws a number whenever its stream is restored."""

    own = torch.zeros(1, dtype=torch.uint8)

    @implements(hooks.random_streams)
    def random_streams(self):
        def restore(state):
            self.own.copy_(state)
            torch.rand(1, device="sim")

        return {"own": RandomStream(self.own.clone, restore, self.own.fill_)}


class SeedsAllButItsOwn(SimulatedDevice):
    """Names a stream of its own, which no seed sets."""

    own = torch.zeros(1, dtype=torch.uint8)

    @implements(hooks.random_streams)
    def random_streams(self):
        return {"own": RandomStream(lambda: self.own, lambda state: None)}


class CountsKilobytes(SimulatedDevice):
    @implements(hooks.memory_stats)
    def memory_stats(self, device):
        return {key: value // 1024 for key, value in self.below.memory_stats(device).items()}


class ForgetsWhatIsHeld(SimulatedDevice):
    """Calls all of its memory free."""

    @implements(hooks.memory_stats)
    def memory_stats(self, device):
        stats = self.below.memory_stats(device)
        return {**stats, "free": stats["total"]}


class WaitsForItself(SimulatedDevice):
    """Waits for each batch."""

    @implements(hooks.place_batch)
    def place_batch(self, unit, batch, device):
        torch.get_device_module(device).synchronize()
        return batch


def fails_to_report():
    raise RuntimeError("no driver")


def warns_itself():
    warnings.warn("careful", UserWarning, stacklevel=1)
    return {}


def its_vendor_warns():
    warnings.warn_explicit("careful", UserWarning, "vendor.py", 1, module="vendor")
    return {}


class CastsParameters(SimulatedDevice):
    """Hides from the precision that parameters are float16."""

    @implements(hooks.refuse_unit)
    def refuse_unit(self, unit, models, optimizers):
        for model in models:
            model.float()
        return []
