"""The names that the package uses, of TE's own files."""

from __future__ import annotations

from transformer_engine.pytorch import constants as constants
from transformer_engine.pytorch import tensor as tensor

# isort: split
# They import each other: the tensors come first.
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch import ops as ops
from transformer_engine.pytorch.attention import DotProductAttention as DotProductAttention
from transformer_engine.pytorch.distributed import checkpoint as checkpoint
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.grouped_linear import GroupedLinear as GroupedLinear
from transformer_engine.pytorch.module.layernorm import LayerNorm as LayerNorm
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear as LayerNormLinear
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP as LayerNormMLP
from transformer_engine.pytorch.module.linear import Linear as Linear
from transformer_engine.pytorch.module.rmsnorm import RMSNorm as RMSNorm
from transformer_engine.pytorch.quantization import (
    autocast as autocast,
)
from transformer_engine.pytorch.quantization import (
    fp8_autocast as fp8_autocast,
)
from transformer_engine.pytorch.quantization import (
    get_default_recipe as get_default_recipe,
)
from transformer_engine.pytorch.quantization import (
    is_fp8_available as is_fp8_available,
)
from transformer_engine.pytorch.quantization import (
    is_fp8_block_scaling_available as is_fp8_block_scaling_available,
)
from transformer_engine.pytorch.quantization import (
    is_mxfp8_available as is_mxfp8_available,
)
from transformer_engine.pytorch.quantization import (
    is_nvfp4_available as is_nvfp4_available,
)

# The wheel's list names layers of attention, and its generators are the GPU's.
distributed.get_te_classes = lambda: (LayerNorm, RMSNorm, TransformerEngineBaseModule)
distributed._get_cuda_rng_state = lambda *_, **__: None
distributed._set_cuda_rng_state = lambda *_, **__: None
