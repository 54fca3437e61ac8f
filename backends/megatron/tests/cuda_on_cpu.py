"""megatron-core on the CPU: what it calls of torch.cuda answers for the CPU. For these tests alone."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_KINDS = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.DoubleTensor": "torch.cuda.DoubleTensor",
}
_installed: list[Any] = []


class _OnCpu(TorchFunctionMode):
    """`device="cuda"` is the CPU, and a tensor's type says cuda."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            found = function(*args)
            return _KINDS.get(found, found)
        if function is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], torch.device("cpu"), *args[2:])
        return function(*args, **kwargs)


class _Nothing:
    """A stream, an event: all of it happens at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def install() -> None:
    """For the rest of this process."""
    if _installed:
        return
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None
    cuda.current_stream = cuda.default_stream = lambda *args: _Nothing()
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Nothing, _Nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.default_generators = (torch.default_generator,)
    cuda.get_device_capability = lambda *args: (8, 0)
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda function, **kwargs: function()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    cuda.FloatTensor, cuda.HalfTensor = torch.FloatTensor, torch.HalfTensor
    cuda.BFloat16Tensor = torch.BFloat16Tensor
    torch._dynamo.config.disable = True  # its compiled helpers take a minute of C++, and change nothing
    mode = _OnCpu()
    mode.__enter__()
    _installed.append(mode)
    # megatron-core asks this of its shards; the mode's frame hides it from accel-megatron's own filter.
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", module=__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

    # 0.16.1 asks for the name without transformer-engine too, and has it only with it.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    # Both are one generator here.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)

    random._lazy_init = cuda._lazy_init
    random._lazy_call = cuda._lazy_call
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
