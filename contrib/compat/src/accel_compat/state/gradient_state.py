"""GradientState: a run's position in its accumulation window and its dataloader."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

from accel_compat import runs
from accel_core import PreparedLoader, Run

SharedDict = dict
_END = "end_of_dataloader"


class GradientState:
    """A run's position in its accumulation window and its dataloader.

    Made by a program, it is about the run that trains; that of an Accelerator, and of what it has prepared,
    about their own run, whatever other Accelerators there are.
    """

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()
    _kwargs: ClassVar[weakref.WeakKeyDictionary[Run, dict[str, Any]]] = weakref.WeakKeyDictionary()

    _begun: list[Any]
    """Weak references to the standalone loaders that are being iterated."""

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(is_xla_gradients_synced=False, _alone=True, _begun=[], _plugin_kwargs={})
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @classmethod
    def of(cls, run: Run) -> GradientState:
        """Return the state of one run."""
        return _OfRun(run)

    def _run(self) -> Run | None:
        return runs.training()

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Options that differ from GradientAccumulationPlugin's defaults."""
        run = self._run()
        kwargs: dict[str, Any] = self.__dict__["_plugin_kwargs"]
        return kwargs if run is None else self._kwargs.setdefault(run, kwargs)

    @plugin_kwargs.setter
    def plugin_kwargs(self, kwargs: dict[str, Any]) -> None:
        run = self._run()
        if run is None:
            self.__dict__["_plugin_kwargs"] = kwargs
        else:
            self._kwargs[run] = kwargs
            if "num_steps" in kwargs:
                run.set_accumulation_steps(kwargs["num_steps"])

    @property
    def initialized(self) -> bool:
        """True if there is a state."""
        return self._shared_state != {}

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is its window's last."""
        run = self._run()
        return bool(self.__dict__["_alone"]) if run is None else run.window.boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._set_sync_gradients(value)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        run = self._run()
        self.__dict__["_alone"] = sync_gradients
        if run is not None:
            for window in {run.window, *(unit.window for unit in run.units)}:
                window.mark_last(sync_gradients)

    @property
    def num_steps(self) -> int:
        """Micro-batches of a window."""
        run = self._run()
        return int(self.plugin_kwargs.get("num_steps", 1)) if run is None else run.accumulation_steps

    @property
    def adjust_scheduler(self) -> bool:
        """True if schedulers step once per window."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the loader's last batch ends a window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated, the innermost last, after a None."""
        run = self._run()
        by_hand = [loader for loader in (each() for each in self._begun) if loader is not None]
        return [None, *(run.active_loaders if run is not None else ()), *by_hand]

    def _add_dataloader(self, dataloader: Any) -> None:
        self._begun.append(weakref.ref(dataloader))

    def _remove_dataloader(self, dataloader: Any) -> None:
        self._begun[:] = [each for each in self._begun if each() not in (None, dataloader)]

    @property
    def active_dataloader(self) -> Any:
        """The innermost loader that is being iterated."""
        if self._begun:
            return self.dataloader_references[-1]
        run = self._run()
        return run.active_loaders[-1] if run is not None and run.active_loaders else None

    @property
    def in_dataloader(self) -> bool:
        """True if a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True if the innermost loader handed out its last batch."""
        loader = self.active_dataloader
        return bool(loader.last if isinstance(loader, PreparedLoader) else getattr(loader, _END, False))

    @property
    def remainder(self) -> int:
        """Number of samples of the loader's last round, over all ranks.

        0 if the round is full, -1 if unknown, as where the dataset makes the batches.
        """
        loader = self.active_dataloader
        sampler = None if loader is None else loader.batch_sampler
        if sampler is None or loader.drop_last or getattr(sampler, "drop_last", False):
            return -1
        if loader.remainder >= 0 or not isinstance(loader, PreparedLoader):
            return int(loader.remainder)
        try:
            return int(loader.total_dataset_length % (loader.total_batch_size or 0))
        except (TypeError, ZeroDivisionError):  # it has no length, or batches of no fixed size
            return -1

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )


class _OfRun(GradientState):
    def __init__(self, run: Run) -> None:
        GradientState()  # there is the shared one from now on
        self.__dict__ = {**self._shared_state, "_own": weakref.ref(run)}

    def _run(self) -> Run | None:
        own: Run | None = self.__dict__["_own"]()
        return own
