"""The part of the Accelerator about state on disk and whole weights."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_core.checkpoint.file import save as write_object
from accel_core.contract.config import metric_and_mode
from accel_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from accel_core.checkpoint.session import LoadedState
    from accel_core.runtime.run import Run


class States:
    """Base of Accelerator, which holds the `run`."""

    run: Run

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these objects with the state.

        They have `state_dict` and `load_state_dict`. Tensors of a state that share memory come back as
        copies, and an object that is in a state twice comes back as two.

        On all ranks, in the same order in each run.

        Raises:
            CheckpointError: one of them lacks these methods; none is registered then.
        """
        for thing in objects:
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise CheckpointError(
                    f"register_for_checkpointing: {type(thing).__name__} cannot be saved and restored\n"
                    "give it state_dict and load_state_dict, returning and taking plain data and tensors"
                )
        self.run.registered.extend(objects)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        wait: bool = True,
        alone: bool = False,
        metrics: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path | str:
        """Write everything that training needs to continue into `output_dir`.

        Atomic, and collective. The directory may be the URL of a store that an installed plugin serves.

        Without a directory, under `automatic_checkpoint_naming`, it is `checkpoints/checkpoint_N` in the
        project's folder, and the oldest are removed down to `total_limit`, once the new one is complete.
        `step` is noted for people; its default is the number of optimizer steps that are done. So are
        `metrics`, alike on all ranks: numbers, or tensors of one. By the one that `project.keep_best` names,
        the best numbered checkpoint stays beyond `total_limit`.
        `extra` has more values, alike on all ranks, by name: numbers, text, tensors, lists and dicts of them
        and whatever else the state of a registered object may have. `load_state` returns them.
        A checkpoint that is there is replaced; any other folder is refused.
        With `wait=False` training stops only while the state is copied, and a thread writes the copy
        (kept for the next save); one save at a time: the next waits for it, and raises what went wrong,
        as do `wait_for_checkpoint` and `end_training`. Returns the directory; a URL is text.

        With `alone` one rank saves by itself, and no other need call: where each rank holds the whole state
        (one process, `ddp`). It is the checkpoint of a world of one: random streams of other ranks start
        anew from a derived seed.

        Raises:
            CheckpointError: the metric of `keep_best` is missing, or not alike on all ranks; or
                gradients are not applied yet, something cannot be stored, the directory holds
                something else, a rank could not write, or `alone` a rank holds only a part of something.
                On all ranks; what was there is unchanged.
        """
        from accel_core.checkpoint.places import as_user_path  # late: start-up need not wait for it

        directory = self._checkpoint_directory(output_dir, "save_state")
        numbers: dict[str, Any] = {"step": step, "metrics": metrics, "extra": extra}
        saved = self.run.checkpoints.save(directory, wait=wait, alone=alone, **numbers)
        return as_user_path(saved)

    def wait_for_checkpoint(self) -> None:
        """Return once the last `save_state(..., wait=False)` is on the disk of all ranks.

        Raises:
            CheckpointError: it failed, on some rank; what was there before is unchanged.
        """
        self.run.checkpoints.wait()

    def save_on_preemption(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> bool:
        """Return True if this job was told to stop by a signal, with its state saved.

        The signal may come on any rank. Collective.

        Call it on all ranks after each step, and leave the loops when it is true. The first call starts
        to watch; a call costs no communication until then, and all ranks stop after the same step.
        Such a checkpoint is never the best by `project.keep_best`.
        Inside an accumulation window it is False. `signals`: those to watch for, of the first call; the
        other arguments as of `save_state`.

        Raises:
            CheckpointError: as `save_state`, at the first call if nothing can be saved to `output_dir`; or
                the ranks cannot agree when to stop, as one is gone.
        """
        if not self.run.stop_signals.is_told(signals, lambda: self._saved_directory(output_dir)):
            return False
        best = self.run.config.project.keep_best if output_dir is None else None
        unmeasured = {metric_and_mode(best)[0]: math.nan} if best else None
        self.save_state(output_dir, step=step, metrics=unmeasured, extra=extra)
        return True

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        missing_ok: bool = False,
        best: bool = False,
    ) -> LoadedState | None:
        """Restore what `save_state` wrote, into the objects prepared so far. Collective.

        In a world of another size weights, optimizers and data go on exactly; random streams start
        anew, from a seed derived from the checkpoint's.

        Args:
            input_dir: what was given to `save_state`. Without it, under `automatic_checkpoint_naming`,
                the newest one that is valid; damaged ones are logged and passed over.
            strict: refuse names that are missing, unexpected or of another shape; else leave them out.
            best: without `input_dir`, take the best by `project.keep_best` in place of the newest.
            missing_ok: where there is no checkpoint yet, do nothing and return None.

        Returns the directory that was loaded, with `step`, `metrics` and `extra` as the save was given them.

        Raises:
            CheckpointError: it is damaged, incomplete, or does not fit; nothing is changed then.
        """
        directory = self._checkpoint_directory(input_dir, "load_state")
        if best and (directory is not None or self.run.config.project.keep_best is None):
            raise CheckpointError(
                "load_state(best=True) goes by project.keep_best, among the numbered checkpoints\n"
                "set project.keep_best, and give no directory"
            )
        return self.run.checkpoints.load(directory, strict=strict, missing_ok=missing_ok, best=best)

    def _saved_directory(self, given: str | os.PathLike[str] | None) -> None:
        """Refuse a directory that a save would refuse."""
        directory = self._checkpoint_directory(given, "save_on_preemption")
        if directory is not None:
            # late: start-up need not wait for them
            from accel_core.checkpoint.places import storage_at
            from accel_core.storage.commit import begin

            begin(storage_at(directory))

    def _checkpoint_directory(
        self, given: str | os.PathLike[str] | None, method: str
    ) -> str | os.PathLike[str] | None:
        self.run.require_alive()
        if given is None and not self.run.config.project.automatic_checkpoint_naming:
            raise CheckpointError(
                f"{method} was given no path\ncall accelerator.{method}('path/of/the/checkpoint'), or set"
                " project.automatic_checkpoint_naming"
            )
        return given

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write `obj` once; a file is replaced when the new one is complete.

        With `save_on_each_node` once per node.

        Not collective. safe_serialization: as safetensors; `obj` then maps names to tensors. Else by
        `torch.save`.

        Raises:
            CheckpointError: safetensors cannot hold it, it cannot be written, or `f` is a URL.
        """
        self.run.require_alive()
        if self._writes:
            write_object(obj, f, safe_serialization=safe_serialization)

    @property
    def _writes(self) -> bool:
        return self.run.world.first_of_disk(each_node=self.run.config.project.save_on_each_node)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's weights, whole and under its own names.

        For other libraries. Collective.

        The layout is that of `from_pretrained`: `model.safetensors`, or files of at most `max_shard_size`
        and `model.safetensors.index.json`; without `safe_serialization` the same by `torch.save`, as
        `pytorch_model.bin`. A weight larger than that gets a file of its own. In safetensors, tied weights
        stand once, under their first name.

        Raises:
            CheckpointError: they could not be written; an earlier save is still there.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        weights.save_model(
            self.run,
            model,
            save_directory,
            limit=max_shard_size,
            safe=safe_serialization,
            here=self._writes,
        )

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, rank0_only: bool = True
    ) -> dict[str, Any]:
        """Return the model's whole state, under the names of its own `state_dict`.

        Collective. Do not write to the tensors.

        If each rank holds whole weights, as under ddp, every rank gets the tensors that it holds. If ranks
        hold parts of weights, these are put together one block at a time: rank 0 gets them on the CPU, and
        the other ranks get an empty dictionary.

        Buffers that each rank has for itself, such as batch norm's statistics under ddp, are this rank's;
        checkpoints and `save_model` hold rank 0's. Extra state (`get_extra_state`) is this rank's too, and
        checkpoints hold every rank's.

        Args:
            model: prepared, or not.
            unwrap: False returns what the wrapped model's own `state_dict` returns.
            rank0_only: False gives every rank the whole weights, on the CPU.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        if not unwrap:
            return model.state_dict()
        return weights.state_dict(self.run, model, rank0_only=rank0_only)

    def iter_weights(
        self, model: nn.Module, dtype: torch.dtype | None = None, to: torch.device | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole weight or buffer) one after the other.

        For models too large to be whole. Collective.

        All ranks must read it to its end, and must not write to the tensors. Tied weights come once.

        Args:
            model: prepared, or not.
            dtype: of floating-point weights; default: their own.
            to: device; default: where they cost least.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        return ((names[0], tensor) for names, tensor in weights.weights_of(self.run, model, dtype, to))

    def full_parameters(
        self, model: nn.Module, names: Iterable[str] | None = None, *, writeback: bool = False
    ) -> AbstractContextManager[Any]:
        """Make parameters of the model (by default all) whole inside a context.

        Collective.

        Args:
            model: prepared, or not.
            names: as in the user's own model.
            writeback: keep what is written to them inside.

        Raises:
            AccelError: it has no such parameter.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        return weights.full_parameters(self.run, model, names, writeback=writeback)
