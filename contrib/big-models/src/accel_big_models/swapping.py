"""Other data for a tensor that stays the same object."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["exchange", "like", "put", "takes"]


def takes(tensor: Tensor, data: Tensor) -> bool:
    """Return True if `tensor.data = data` is possible: both are of torch's own kinds."""
    plain = all(type(each).__torch_dispatch__ is Tensor.__torch_dispatch__ for each in (tensor, data))
    return plain and torch._has_compatible_shallow_copy_type(tensor, data)


def put(tensor: Tensor, data: Tensor) -> None:
    """Give a parameter or buffer other data, of any device; it stays the same object."""
    if takes(tensor, data):
        tensor.data = data
    else:  # from the meta device, or to a device whose tensors are a class of their own
        exchange(tensor, like(tensor, data))


def like(tensor: Tensor, data: Tensor) -> Tensor:
    """Return `data` as what `tensor` is: a parameter like it, or a buffer."""
    if not isinstance(tensor, nn.Parameter):
        return data.detach()
    made: Tensor = nn.Parameter(data.detach(), requires_grad=tensor.requires_grad)
    if type(tensor).__torch_dispatch__ is type(made).__torch_dispatch__:
        made.__class__ = type(tensor)
    known = vars(made)
    known.update({name: value for name, value in vars(tensor).items() if name not in known})
    return made


def exchange(first: Tensor, second: Tensor) -> None:
    """Exchange what two tensors are; references to each see the other from now on.

    As `torch.utils.swap_tensors`, which refuses tensors that others refer to weakly.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)
