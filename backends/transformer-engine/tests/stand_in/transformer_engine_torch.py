"""TE's extension, in torch on the CPU: what its layers call under delayed and current scaling.

Products are of the values that float8 holds, in float32. Names that the layers only mention are `Unused`.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import count
from types import SimpleNamespace
from typing import Any

import te_optimizer_kernels
import torch
from torch import Tensor

multi_tensor_adam = te_optimizer_kernels.multi_tensor_adam
multi_tensor_l2norm = te_optimizer_kernels.multi_tensor_l2norm
multi_tensor_scale = te_optimizer_kernels.multi_tensor_scale

CAPABILITY = (9, 0)
"""Of the chip that is stood for."""

DType = IntEnum(
    "DType",
    ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"],
    start=0,
)
TORCH = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    [f"GEMM{number}_{kind}" for number in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors",
    [f"{kind}{number}" for number in (1, 2, 3) for kind in ("GRAD_OUTPUT", "GRAD_INPUT")],
    start=0,
)
_numbers = count(1000)


class Unused:
    """An enumeration or function that no layer here uses."""

    def __init__(self, name: str) -> None:
        self.name, self.number = name, next(_numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Unused(f"{self.name}.{name}"))

    def __int__(self) -> int:
        return self.number

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the stand-in has no {self.name}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return globals().setdefault(name, Unused(name))


def properties(_device: Any) -> Any:
    return SimpleNamespace(major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=1)


def get_cublasLt_version() -> int:
    return 130000


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
    )
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    kind = TORCH[DType(int(quantizer.dtype))]
    largest = torch.finfo(kind).max
    tensor = tensor.detach()
    amax = tensor.float().abs().max() if tensor.numel() else torch.zeros(())
    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(
                amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group
            )
        scale = largest / amax.clamp(min=max(quantizer.amax_epsilon, 1e-30)).reshape(1)
        if quantizer.force_pow_2_scales:
            scale = torch.exp2(scale.log2().floor())
    elif isinstance(quantizer, Float8Quantizer):
        # Kernels keep the larger one (atomicMaxFloat), until an update sets it to zero.
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.reshape(quantizer.amax.shape)))
        scale = quantizer.scale.clone().reshape(1)
    else:
        raise NotImplementedError(f"the stand-in has no {type(quantizer).__name__}")
    data = (tensor.float() * scale).clamp(-largest, largest).to(kind).view(torch.uint8)
    inverse = scale.reciprocal()
    transposed = fp8_transpose(data, quantizer.dtype) if quantizer.columnwise_usage else None
    if output is not None:
        output._data.copy_(data)
        output._scale_inv.copy_(inverse)
        if output._transpose is not None:
            output._transpose.copy_(fp8_transpose(data, quantizer.dtype))
            output._transpose_invalid = False
        return output
    given = {
        "data": data,
        "fp8_scale_inv": inverse,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": transposed,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=tensor.dtype, **given)
    return Float8Tensor(shape=data.shape, dtype=tensor.dtype, device=data.device, **given)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    turned = data.reshape(-1, data.shape[-1]).t().contiguous()
    turned = turned.view(data.shape[-1], *data.shape[:-1])
    return turned if out is None else out.copy_(turned)


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    kind = TORCH[DType(int(tensor._fp8_dtype))]
    data = tensor._data if tensor._data is not None else tensor._transpose.movedim(0, -1).contiguous()
    return (data.view(kind).float() * tensor._scale_inv).to(TORCH[DType(int(dtype))])


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """D = B @ A in rows: TN is the forward, NN the input's gradient, NT the weight's."""
    assert quantizer is None
    assert not gelu
    left, right = _operand(B, columns=transb), _operand(A, columns=not transa)
    left = left.t() if transb else left
    right = right.t() if transa else right
    product = left @ right
    grad_bias = None
    if bias is not None and not grad:
        product = product + bias.float()
    elif bias is not None:
        grad_bias = _operand(B, columns=transb).sum(0).to(bias.dtype)
    lead = () if transb else _shape(B)[:-1]
    kind = TORCH[DType(int(out_dtype))] if out_dtype is not None else D.dtype
    product = product.to(kind)
    product = product if transb else product.view(*lead, product.shape[-1])
    if D is not None:
        product = D.add_(product) if accumulate else D.copy_(product.view(D.shape))
    return product, grad_bias, None, None


def _shape(tensor: Any) -> Any:
    return tensor.size()


def _operand(tensor: Any, *, columns: bool) -> Tensor:
    """An operand's values as a matrix; Hopper reads float8 along rows, so others need the transpose."""
    if not hasattr(tensor, "_scale_inv"):
        return tensor.float().reshape(-1, tensor.shape[-1])
    kind = TORCH[DType(int(tensor._fp8_dtype))]
    if columns:
        assert tensor._transpose is not None, "the product needs the transposed copy"
        assert not tensor._transpose_invalid, "the transposed copy is stale"
        matrix = tensor._transpose.view(kind).float()
        return (matrix.reshape(matrix.shape[0], -1) * tensor._scale_inv).t()
    matrix = tensor._data.view(kind).float()
    return matrix.reshape(-1, matrix.shape[-1]) * tensor._scale_inv


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantizer(grad)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """As `_amax_and_scale_update` of TE's own Python does it, for all layers at once."""
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    recipe = DelayedScaling(margin=int(margin), amax_compute_algo=amax_compute_algo)
    largest = torch.finfo(TORCH[DType(int(fp8_dtype))]).max
    parts = amax_reduction_buffer.split([scale.numel() for scale in scales])
    for part, history, scale in zip(parts, amax_histories, scales, strict=True):
        history[0].copy_(part)
        _amax_and_scale_update(history, scale, largest, recipe)


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = input.float()
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + eps).rsqrt()
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    out = (x - mean[:, None]) * rstd[:, None] * gamma + bias.float()
    out = out.to(TORCH[DType(int(otype))])
    return out if quantizer is None else quantize(out, quantizer, ln_out), mean, rstd


def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    normal = (x.float() - mu[:, None]) * rsigma[:, None]
    scaled = dz.float() * (gamma.float() + 1 if zero_centered_gamma else gamma.float())
    dx = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    dgamma, dbeta = (dz.float() * normal).sum(0), dz.float().sum(0)
    return (dx * rsigma[:, None]).to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:
    x = input.float()
    rstd = (x.square().mean(-1) + eps).rsqrt()
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    out = (x * rstd[:, None] * gamma).to(TORCH[DType(int(otype))])
    return out if quantizer is None else quantize(out, quantizer, ln_out), None, rstd


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    normal = x.float() * rsigma[:, None]
    scaled = dz.float() * (gamma.float() + 1 if zero_centered_gamma else gamma.float())
    dx = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rsigma[:, None]
    return dx.to(x.dtype), (dz.float() * normal).sum(0).to(gamma.dtype)


def gelu(input: Tensor, quantizer: Any) -> Any:
    out = torch.nn.functional.gelu(input.float(), approximate="tanh").to(input.dtype)
    return out if quantizer is None else quantizer(out)


def dgelu(grad: Tensor, input: Tensor, quantizer: Any) -> Any:
    dx = torch.ops.aten.gelu_backward(grad.float(), input.float(), approximate="tanh").to(grad.dtype)
    return dx if quantizer is None else quantizer(dx)


def dbias_dgelu(grad: Tensor, input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    dx = dgelu(grad, input, None)
    return dx.reshape(-1, dx.shape[-1]).sum(0), quantizer(dx)
