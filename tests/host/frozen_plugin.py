"""A plugin as it was written for API 0.9. Do not edit: that it keeps working is the promise.

Since then `backward` has grown `boundary` and `options`, `clip_gradients` `norm_type`, `zero_grad`
`set_to_none`, `wrap_model` `unit`, and the plugin passes on what it does not do itself by `below`.
"""

from __future__ import annotations

from accel_core import Card, hooks, implements

CARD = Card(
    name="frozen",
    slot="strategy",
    summary="A strategy of long ago.",
    api_version="1.0",
    implementation="frozen_plugin:Frozen",
)


class Frozen:
    def __init__(self, config, run):
        self.config, self.run, self.calls = config, run, []

    @implements(hooks.wrap_model)
    def wrap_model(self, model):
        self.calls.append("wrap_model")
        return model

    @implements(hooks.backward)
    def backward(self, loss, unit):
        self.calls.append("backward")
        loss.backward()

    @implements(hooks.clip_gradients)
    def clip_gradients(self, unit, parameters, limit):
        self.calls.append("clip_gradients")
        return self.below.clip_gradients(unit, parameters, limit, 2.0)

    @implements(hooks.zero_grad)
    def zero_grad(self, optimizer):
        self.calls.append("zero_grad")
        optimizer.zero_grad()

    @implements(hooks.after_step)
    def after_step(self, unit):
        self.calls.append("after_step")
