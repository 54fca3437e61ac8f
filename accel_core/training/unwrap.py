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
        run: that has prepared it.
        model: as `prepare` returned it, or as it was given; a copy of what `prepare` returned; or
            `torch.compile` of one of these. Also after `free_memory`, but for copies.
        keep_contexts: False gives a view of it that shares its tensors and enters no autocast.
        keep_compiled: False gives a view of it that shares its tensors and runs eagerly.

    Raises:
        AccelError: it is not a model.
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
