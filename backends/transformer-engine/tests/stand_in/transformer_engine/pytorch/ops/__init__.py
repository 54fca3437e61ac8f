"""The operations that the layers use; others need Triton."""

from __future__ import annotations

from transformer_engine.pytorch.ops.basic.layer_norm import LayerNorm as LayerNorm
from transformer_engine.pytorch.ops.basic.rmsnorm import RMSNorm as RMSNorm
from transformer_engine.pytorch.ops.op import FusibleOperation as FusibleOperation
from transformer_engine.pytorch.ops.sequential import Sequential as Sequential
