"""Collectives of a piece of code, by kind and bytes: a count has no noise.

```python
with Traffic() as ours:
    train_a_window()
with Traffic() as by_hand:
    train_the_same_by_hand()
assert ours.kinds() == by_hand.kinds()
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Traffic"]

KINDS: Final = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier"),
    *("gather", "scatter", "reduce", "send", "recv"),
)
"""Words for all of torch's operators of a kind, those with longer names first."""
NOT_COLLECTIVES: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd"})


class Traffic(TorchDispatchMode):
    """A context that counts this rank's collectives, sends and receives.

    It sees what torch dispatches: process groups, functional collectives, those of DTensors and of backward.
    A key-value store's messages are not among them. torch's CommDebugMode counts neither bytes nor what goes
    from rank to rank.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []
        """Each collective, in its order: its kind and its bytes.

        Bytes are the larger of what goes in and what comes out.
        """

    def kinds(self) -> dict[str, tuple[int, int]]:
        """Return kind -> (number of collectives, bytes of all of them)."""
        found: dict[str, tuple[int, int]] = {}
        for kind, size in self.calls:
            count, total = found.get(kind, (0, 0))
            found[kind] = (count + 1, total + size)
        return found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again, with the collectives and the local tensors of it
        result = func(*args, **(kwargs or {}))
        if func.namespace.endswith(("c10d", "c10d_functional", "c10d_functional_autograd")):
            name = func.overloadpacket.__name__
            if name not in NOT_COLLECTIVES:
                self.calls.append((_kind(name), max(map(_bytes, (*args, result)))))
        return result


def _kind(name: str) -> str:
    letters = name.replace("_", "")
    return next((kind for kind in KINDS if kind.replace("_", "") in letters), name)


def _bytes(value: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return sum(map(_size, tensors))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
