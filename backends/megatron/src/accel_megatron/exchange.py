"""Write and read megatron-core's own checkpoints of a prepared model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_core import CheckpointError
from accel_megatron import library

if TYPE_CHECKING:
    import os

    from torch import nn

    from accel_core import Accelerator

__all__ = ["export_checkpoint", "import_checkpoint"]

_METADATA: Final = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def export_checkpoint(
    accelerator: Accelerator, model: nn.Module, directory: str | os.PathLike[str], *, optimizer: bool = True
) -> None:
    """Write a `dist_checkpointing` directory, as Megatron-LM does.

    Weights, and the optimizer's state.

    Collective. It starts processes: a script that calls this needs `if __name__ == "__main__":`.

    Args:
        accelerator: of the run.
        model: prepared.
        directory: made if it is not there; must be empty.
        optimizer: write its state too.
    """
    folder = Path(directory)
    with library.quiet():
        from megatron.core import dist_checkpointing

        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        accelerator.wait_for_everyone()
        dist_checkpointing.save(_described(accelerator, model, optimizer, loading=False), str(folder))


def import_checkpoint(
    accelerator: Accelerator, model: nn.Module, directory: str | os.PathLike[str], *, optimizer: bool = True
) -> None:
    """Read a checkpoint of `export_checkpoint`, or of Megatron-LM with such a model.

    Collective.

    The layout may be another. Only for directories that you trust: megatron-core unpickles their files.

    Raises:
        CheckpointError: the directory is not such a checkpoint.
    """
    with library.quiet():
        from megatron.core import dist_checkpointing

        if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
            raise CheckpointError(
                f"{directory} is not a directory of megatron-core's dist_checkpointing\n"
                "give the folder that has its metadata.json, such as iter_0001000",
                path=str(directory),
            )
        described = _described(accelerator, model, optimizer, loading=True)
        found = dist_checkpointing.load(described, str(directory))
        unit = _unit(accelerator, model)
        engine, stepper = unit.plugin.engines[unit], unit.plugin.steppers.get(unit)
        for number, chunk in enumerate(engine.chunks.raw):
            chunk.load_state_dict(found[_key(number, len(engine.chunks.raw))])
        if stepper is not None and optimizer:
            stepper.inner.load_state_dict(found["optimizer"])
            stepper.lead()
        elif stepper is not None:
            stepper.inner.reload_model_params()


def _described(
    accelerator: Accelerator, model: nn.Module, optimizer: bool, *, loading: bool
) -> dict[str, Any]:
    """Sharded state dict of megatron-core: live tensors and their places."""
    unit = _unit(accelerator, model)
    engine, stepper = unit.plugin.engines[unit], unit.plugin.steppers.get(unit)
    chunks = engine.chunks.raw
    if stepper is not None and not loading:
        stepper.refresh()  # stepped weights may still be on their way to the other ranks
    found: dict[str, Any] = {"checkpoint_version": 3.0}
    for number, chunk in enumerate(chunks):
        found[_key(number, len(chunks))] = chunk.sharded_state_dict(metadata=dict(_METADATA))
    if stepper is not None and optimizer:
        _refuse(stepper)
        found["optimizer"] = stepper.inner.sharded_state_dict(
            found, is_loading=loading, metadata=dict(_METADATA)
        )
    return found


def _refuse(stepper: Any) -> None:
    """Raise for state that megatron-core's format cannot hold."""
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER

    groups = stepper.inner.param_groups
    kinds = {(group["wd_mult"], group["lr_mult"], group["is_expert_parallel"]) for group in groups}
    distributed = any(
        hasattr(inner_optimizer, "gbuf_ranges") for inner_optimizer in stepper.inner_optimizers()
    )
    reasons = {
        "two groups of the optimizer have one rate and both decay, or do not, and are one group to it": (
            len(kinds) < len(groups)
        ),
        "it cannot read back what its distributed optimizer keeps, unless transformer-engine or apex steps": (
            distributed and USING_PYTORCH_OPTIMIZER
        ),
    }
    for reason in (reason for reason, is_so in reasons.items() if is_so):
        raise CheckpointError(
            f"megatron-core's checkpoint: {reason}\n"
            "write and read weights only (optimizer=False); accelerator.save_state keeps it all"
        )


def _key(number: int, chunks: int) -> str:
    return "model" if chunks == 1 else f"model{number}"


def _unit(accelerator: Accelerator, model: nn.Module) -> Any:
    unit: Any = accelerator.run.prepared.unit_of_model(model)
    if unit is None or unit not in getattr(unit.plugin, "engines", {}):
        raise CheckpointError("this model was not prepared by strategy megatron\nprepare it first")
    return unit
