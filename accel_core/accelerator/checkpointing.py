"""The Accelerator's methods for checkpoints and whole weights."""

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
        """Save and restore these objects with each checkpoint.

        Objects need `state_dict` and `load_state_dict`. Tensors of a state that share memory are restored as
        copies, and an object that a state contains twice is restored as two objects.

        Call it on all ranks, in the same order in each run.

        Raises:
            CheckpointError: an object lacks these methods; no object is registered then.
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
        """Save the state that training needs to continue as a checkpoint in `output_dir`. Atomic, collective.

        An existing checkpoint in the directory is replaced; any other folder is refused.

        Args:
            output_dir: a directory, or the URL of a store that an installed plugin serves. Default, under
                `automatic_checkpoint_naming`: `checkpoints/checkpoint_N` in the project's folder. Once the
                new checkpoint is complete, the oldest are removed down to `total_limit`.
            step: a number recorded for people. Default: the number of optimizer steps done.
            wait: False stops training only while the state is copied. A thread writes the copy, whose memory
                is kept for the next save. One save runs at a time: the next save waits for the thread and
                raises its error, as do `wait_for_checkpoint` and `end_training`.
            alone: this rank saves by itself, and no other rank need call. Each rank must hold the whole state
                (one process, `ddp`). The checkpoint is saved as in a world of one: random streams of other
                ranks start anew from a derived seed.
            metrics: name -> number or tensor of one element, equal on all ranks. The best numbered
                checkpoint, by the metric that `project.keep_best` names, is kept beyond `total_limit`.
            extra: name -> value, equal on all ranks: numbers, text, tensors, lists and dicts of these, and
                anything else that the state of a registered object may hold. `load_state` returns it.

        Returns:
            The directory; a URL as text.

        Raises:
            CheckpointError: the metric of `keep_best` is missing, or differs between ranks; gradients are
                not applied yet; a value cannot be stored; the directory holds something else; a rank could
                not write; or, with `alone`, the rank holds only a part of a value. Raised on all ranks; the
                existing checkpoint is unchanged.
        """
        from accel_core.checkpoint.places import as_user_path  # late: start-up need not wait for it

        directory = self._checkpoint_directory(output_dir, "save_state")
        numbers: dict[str, Any] = {"step": step, "metrics": metrics, "extra": extra}
        saved = self.run.checkpoints.save(directory, wait=wait, alone=alone, **numbers)
        return as_user_path(saved)

    def wait_for_checkpoint(self) -> None:
        """Return once all ranks have written the last `save_state(..., wait=False)`.

        Raises:
            CheckpointError: the save failed on some rank; the checkpoint that was there before is unchanged.
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
        """Return True if a signal told this job to stop, after saving its state. Collective.

        Call it on all ranks after each step, and leave the training loops when it returns True. The signal
        may come on any rank, and all ranks stop after the same step. The first call starts to watch for
        signals; calls cost no communication until a signal comes. Inside an accumulation window the result
        is False. `project.keep_best` never counts this checkpoint as the best.

        Args:
            output_dir: as in `save_state`.
            step: as in `save_state`.
            extra: as in `save_state`.
            signals: signals to watch for; the first call decides.

        Raises:
            CheckpointError: as in `save_state`; at the first call also if nothing can be saved to
                `output_dir`; or the ranks cannot agree when to stop, because a rank is gone.
        """
        if not self.run.stop_signals.should_stop(signals, lambda: self._refuse_saved_directory(output_dir)):
            return False
        best = self.run.config.project.keep_best if output_dir is None else None
        # No metric was computed for this step, but save_state refuses a missing metric.
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
        """Restore a checkpoint of `save_state` into the objects prepared so far. Collective.

        In a world of another size, weights, optimizers and data continue exactly; random streams start anew,
        from a seed derived from the checkpoint's seed.

        Args:
            input_dir: the directory passed to `save_state`. Default, under `automatic_checkpoint_naming`:
                the newest valid checkpoint; damaged checkpoints are logged and skipped.
            strict: refuse names that are missing, unexpected or of another shape. False leaves them out.
            missing_ok: if there is no checkpoint yet, do nothing and return None.
            best: without `input_dir`, load the best checkpoint by `project.keep_best`, not the newest.

        Returns:
            The directory that was loaded, with the `step`, `metrics` and `extra` that were saved.

        Raises:
            CheckpointError: the checkpoint is damaged, incomplete, or does not fit; no object is changed.
        """
        directory = self._checkpoint_directory(input_dir, "load_state")
        if best and (directory is not None or self.run.config.project.keep_best is None):
            raise CheckpointError(
                "load_state(best=True) goes by project.keep_best, among the numbered checkpoints\n"
                "set project.keep_best, and give no directory"
            )
        return self.run.checkpoints.load(directory, strict=strict, missing_ok=missing_ok, best=best)

    def _refuse_saved_directory(self, given: str | os.PathLike[str] | None) -> None:
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
        """Write `obj` once, or once per node under `save_on_each_node`. Not collective.

        An existing file is replaced when the new one is complete.

        Args:
            obj: the object; with `safe_serialization`, a mapping of names to tensors.
            f: the file.
            safe_serialization: write safetensors. False: use `torch.save`.

        Raises:
            CheckpointError: safetensors cannot hold `obj`, the file cannot be written, or `f` is a URL.
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
        """Write the model's whole weights under its own names, for other libraries. Collective.

        The layout is as `from_pretrained` reads it: `model.safetensors`, or files of at most `max_shard_size`
        and `model.safetensors.index.json`; without `safe_serialization`, the same by `torch.save`, as
        `pytorch_model.bin`. A weight larger than `max_shard_size` gets a file of its own. safetensors files
        hold tied weights once, under their first name.

        Raises:
            CheckpointError: the weights could not be written; an earlier save is still there.
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
        """Return the model's whole state, under the names of its own `state_dict`. Collective.

        Do not write to the tensors.

        If each rank holds whole weights, as under ddp, every rank gets the tensors that it holds. If ranks
        hold parts of weights, the parts are joined one block at a time: rank 0 gets whole weights on the CPU,
        and the other ranks get an empty dictionary.

        Buffers that differ between ranks, such as batch norm statistics under ddp, are this rank's;
        checkpoints and `save_model` hold rank 0's buffers. Extra state (`get_extra_state`) is this rank's
        too; checkpoints hold the extra state of every rank.

        Args:
            model: a model, prepared or not.
            unwrap: False returns the result of the model's own `state_dict`, wrappers included.
            rank0_only: False gives every rank the whole weights, on the CPU.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        if not unwrap:
            return model.state_dict()
        return weights.state_dict(self.run, model, rank0_only=rank0_only)

    def iter_weights(
        self, model: nn.Module, dtype: torch.dtype | None = None, to: torch.device | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of (name, whole weight or buffer), for models too large to be whole. Collective.

        All ranks must read it to its end, and must not write to the tensors. Tied weights come once.

        Args:
            model: a model, prepared or not.
            dtype: dtype of floating-point weights; default: their own.
            to: device of the weights; default: the cheapest for the strategy.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        return ((names[0], tensor) for names, tensor in weights.weights_of(self.run, model, dtype, to))

    def full_parameters(
        self, model: nn.Module, names: Iterable[str] | None = None, *, writeback: bool = False
    ) -> AbstractContextManager[Any]:
        """Return a context in which parameters of the model are whole. Collective.

        Args:
            model: a model, prepared or not.
            names: names of parameters, as in the user's own model; default: all.
            writeback: keep changes that are made to the parameters inside.

        Raises:
            AccelError: the model has no parameter of this name.
        """
        from accel_core.checkpoint import weights  # late: start-up need not wait for it

        return weights.full_parameters(self.run, model, names, writeback=writeback)
