"""One reduction of gradients for all micro-batches of a pipeline's window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import define
from torch.distributed.fsdp import FSDPModule

from accel_core import AccelError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Reduction"]


@define(eq=False)
class Reduction:
    """A context around a window: only this rank's last backward reduces gradients.

    torch's stages do so for a stage that is itself sharded by `fully_shard`
    (torch/distributed/pipelining/stage.py, `backward_maybe_with_nosync`); here the model around the stages
    is. Weights stay gathered between backwards, as they do there.
    """

    modules: Sequence[FSDPModule]
    left: int
    """Backwards of this rank that have not begun."""
    is_waiting: bool = False

    @classmethod
    def of(cls, models: Iterable[nn.Module], backwards: int) -> Reduction:
        """Return the reduction of all sharded modules in these models."""
        modules = [part for model in models for part in model.modules() if isinstance(part, FSDPModule)]
        return cls(modules, backwards)

    def __enter__(self) -> None:
        pass

    def wait(self) -> None:
        """Put off reducing, from the first forward that is not a rehearsal of torch's."""
        if not self.is_waiting and self.left > 1:
            self._set(reduces=False)

    def watch(self, output: Tensor) -> Tensor:
        """Count the backward of this output of a stage when it begins."""
        if output.requires_grad:
            output.register_hook(lambda _: self._begun())
        else:  # everything up to here is frozen
            self._begun()
        return output

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.is_waiting:
            self._set(reduces=True)
            if kind is None:
                raise AccelError(
                    f"pipeline: {self.left} backwards of this window never began, so nothing was reduced\n"
                    "set accumulation.sync_each_batch: true, and report this"
                )

    def _begun(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._set(reduces=True)

    def _set(self, *, reduces: bool) -> None:
        self.is_waiting = not reduces
        for module in self.modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_reshard_after_backward(reduces, recurse=False)
            module.set_is_last_backward(reduces)
