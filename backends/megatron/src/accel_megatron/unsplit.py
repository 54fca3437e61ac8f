"""Any model that each rank has as a whole.

Its own forward, megatron-core's gradients and step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accel_megatron import building, settings
from accel_megatron.engine import Engine
from accel_megatron.library import quiet
from accel_megatron.native import NativeModel
from accel_megatron.shard_map import same

if TYPE_CHECKING:
    from accel_core import Run
    from accel_megatron.config import Sized

__all__ = ["UnsplitEngine", "build", "serves", "unserved"]

_OF_ADAPTERS: Final = (
    "recompute_activations",
    "custom_get_batch_function",
    "custom_loss_function",
    "custom_train_step_class",
    "return_logits",
    "seq_length",
    "encoder_seq_length",
    "decoder_seq_length",
)
"""Options that only models of megatron-core itself know."""


def serves(plugin: Sized) -> bool:
    """Return True if each rank has all of a model."""
    return plugin.tp == plugin.pp == 1


def unserved(plugin: Sized, model: nn.Module) -> str | None:
    """Reason: options that mean nothing to a model with a forward of its own."""
    asked = [f"megatron.{name}" for name in _OF_ADAPTERS if getattr(plugin, name)]
    asked += ["parallelism.ep"] if plugin.ep > 1 else []
    asked += [f"megatron.other_megatron_args.{name}" for name in settings.of_layers(plugin)]
    if not asked:
        return None
    return (
        f"{', '.join(asked)}: {type(model).__name__} runs its own forward, which"
        " knows nothing of that\n"
        "leave it out, or give a model with an adapter, or one of accel_megatron.build_model"
    )


class Whole(nn.Module):
    """A chunk for megatron-core's schedule and wrappers: the user's whole module."""

    pre_process = post_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, inner: nn.Module) -> None:
        super().__init__()
        with quiet():
            from megatron.core.enums import ModelType
        self.config, self.inner = config, inner
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor: object) -> None:
        """Do nothing, as there is no stage before."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the user's own forward."""
        return self.inner(*args, **inputs)

    def sharded_state_dict(self, metadata: Any) -> Any:
        """State for megatron-core's checkpoints: the user's names, alike on all ranks."""
        from megatron.core.transformer.utils import sharded_state_dict_default

        return sharded_state_dict_default(self.inner, metadata=metadata)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state with the user's names."""
        return self.inner.load_state_dict(state_dict, strict, assign)


def build(run: Run, plugin: Sized, model: nn.Module) -> building.Chunks:
    """Return the model as this rank's only chunk, on the device.

    Its parameters stay the user's.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to_empty(device=run.device)
    # Gradient buffers are contiguous: another memory order would get the gradients of other elements.
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    config = settings.build(run, plugin, None, num_layers=1, hidden_size=1, num_attention_heads=1)
    chunks = building.made(run, plugin, None, lambda **_: Whole(config, model))
    return building.Chunks(
        config, chunks, {each: [same(name, each)] for name, each in model.named_parameters()}, scheduled=False
    )


class UnsplitEngine(Engine):
    """A model that is called as ever.

    Outside of the schedule forward is forward, and backward backward.
    """

    @classmethod
    def of(cls, run: Run, plugin: Sized, model: nn.Module) -> UnsplitEngine:
        """Return an engine around the model."""
        return cls(model, build(run, plugin, model), NativeModel(), plugin)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the user's own forward, with inputs in the dtype of the weights."""
        chunk = self._chunk or self.chunks.run[0]
        dtype = self.chunks.config.params_dtype
        if dtype is not torch.float32:
            args, inputs = tree_map_only(Tensor, lambda each: _cast(each, dtype), (args, inputs))
        return chunk(*args, **inputs)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor
