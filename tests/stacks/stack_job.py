"""What each rank of a stack does: train the decoder, or be refused."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn

from accel_testing import decoder

__all__ = ["gpt2", "trained"]


def gpt2() -> nn.Module:
    """Megatron splits models of transformers, whose layers it knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what it imports
        from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=decoder.WORDS,
        n_positions=decoder.LENGTH,
        n_embd=decoder.WIDTH,
        n_layer=4,
        n_head=decoder.HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


MODELS = {"decoder": decoder.Decoder, "experts": partial(decoder.Decoder, sparse=True), "gpt2": gpt2}


def trained(stack: Mapping[str, Any]) -> decoder.Trace | str:
    """Return losses, norms and rates, or the text of a refusal."""
    _enter(stack)
    from accel_core import Accelerator, ConfigError, InitProcessGroupKwargs, PluginError
    from accel_testing.patience import patience

    warnings.simplefilter("ignore")
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    try:
        accelerator = Accelerator(device=stack["device"], kwargs_handlers=[limit])
        make = MODELS[stack["model"]]
        if stack["sp"]:
            make = partial(_exchanging, make, accelerator)
        losses = _with_positions if stack["sp"] else _of_gpt2 if stack["model"] == "gpt2" else decoder.loss_of
        return decoder.trained(stack["whole_windows"], accelerator, make=make, loss_of=losses)
    except (ConfigError, PluginError) as error:
        return str(error)


def _enter(stack: Mapping[str, Any]) -> None:
    sys.path[:0] = stack["path"]
    if stack["model"] == "gpt2" or stack["cuda_on_cpu"]:
        import cuda_on_cpu

        cuda_on_cpu.install()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core.optimizer  # noqa: F401
    if stack["simulate"] is not None:
        from accel_testing.simulated.simulate import simulate_plugin

        simulate_plugin(*stack["simulate"])


def _exchanging(make: Any, accelerator: Any) -> nn.Module:
    """Return the model with DeepSpeed's attention over parts of sequences."""
    from deepspeed.sequence.layer import DistributedAttention

    model = make()
    group = accelerator.run.mesh.device_mesh["cp"].get_group()
    for block in model.blocks:
        attend = DistributedAttention(block.attend, group, scatter_idx=1, gather_idx=2)
        block.attend = lambda *heads, attend=attend: attend(*heads, batch_dim_idx=0)
    return model


def _with_positions(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["input_ids"], batch["position_ids"])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), None


def _of_gpt2(model: nn.Module, batch: Any) -> Any:
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), None
