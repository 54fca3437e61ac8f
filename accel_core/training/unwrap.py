"""The user's own module inside a prepared model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_core.errors import AccelError
from accel_core.training.autocast import without_contexts
from accel_core.training.names import inside

if TYPE_CHECKING:
    from torch import nn

    from accel_core.contract.run import Run


def unwrap_model(
    run: Run, model: nn.Module, *, keep_contexts: bool = True, keep_compiled: bool = True
) -> nn.Module:
    """Return the user's own module inside a prepared model.

    A model that was not prepared is returned as it is.

    Args:
        run: the run that has prepared the model.
        model: the original or the prepared model, a copy of the prepared model, or `torch.compile` of any of
            them. After `free_memory`, copies are returned as they are.
        keep_contexts: False returns a view that shares the module's tensors and enters no autocast.
        keep_compiled: False returns a view that shares the module's tensors and runs eagerly.

    Raises:
        AccelError: `model` is not a model.
    """
    if not hasattr(model, "__dict__"):  # None, a number, a list
        raise AccelError(
            f"unwrap_model: a {type(model).__name__} is not a model\ngive one model, as prepare returned it"
        )
    prepared = run.prepared
    unit = prepared.unit_of_model(model)
    if unit is None:
        inner: nn.Module = prepared.inside_copy(model, keep_compiled)
    else:
        known = inside(model) if prepared.form_of(model) is None else model
        inner = unit.hooks.unwrap_model(unit, known, keep_compiled)
    if not keep_contexts:
        inner = without_contexts(inner)
    prepared.note_view(inner, model)
    return inner
