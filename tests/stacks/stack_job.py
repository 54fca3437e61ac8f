"""The job of each rank: it trains a small decoder on the stack, or is refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from stack_space import DEVICES, Stack
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accel_core import Accelerator, ConfigError, InitProcessGroupKwargs, PluginError
from accel_testing import decoder
from accel_testing.patience import patience

__all__ = ["has_whole_windows", "model_of", "trained"]

BACKENDS: Final = Path(__file__).parents[2] / "backends"
ANSWERING: Final = ("cuda", "xpu", "mps")
"""Devices of torch's own, for which a module answers; the others have a stand-in for their library."""


def trained(stack: Stack) -> decoder.Trace | str:
    """Return losses, norms and rates; of a stack that is refused, the text of the error."""
    _enter(stack)
    warnings.simplefilter("ignore")  # of the vendors' libraries
    limit = InitProcessGroupKwargs(timeout=timedelta(seconds=patience(20)))
    try:
        accelerator = Accelerator(device=stack.device, kwargs_handlers=[limit])
        make, loss_of = model_of(stack), _by_keyword
        if "sp" in stack.dims:
            make, loss_of = partial(_exchanging, make, accelerator), _with_positions
        return decoder.trained(has_whole_windows(stack), accelerator, make=make, loss_of=loss_of)
    except (ConfigError, PluginError) as error:
        if isinstance(error.__cause__, ImportError):  # a plugin that is broken refuses nothing
            raise
        return str(error)


def has_whole_windows(stack: Stack) -> bool:
    """Tell if the strategy owns the schedule of a window."""
    return "pp" in stack.dims or stack.strategy == "megatron"


def model_of(stack: Stack) -> Callable[[], nn.Module]:
    """Return the function that makes the stack's model: a decoder, one with experts, or a GPT-2."""
    if stack.strategy == "megatron":
        return gpt2
    return sparse if "ep" in stack.dims else decoder.Decoder


def sparse() -> nn.Module:
    """Make a decoder with experts."""
    return decoder.Decoder(sparse=True)


def gpt2() -> nn.Module:
    """Make a model of transformers: megatron knows their layers and can split them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    # Half of a layer has 16 features, of which float8 needs multiples.
    sizes = {"vocab_size": decoder.WORDS, "n_positions": decoder.LENGTH, "n_embd": 32}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(**sizes, **dropouts, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def _enter(stack: Stack) -> None:
    """Make this process one of a machine that has the device and the vendors' libraries."""
    if stack.precision == "fp8-te":
        sys.path.insert(0, str(BACKENDS / "transformer-engine/tests/stand_in"))
    if stack.strategy == "megatron":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries that they do not find
            import cuda_on_cpu_now  # noqa: F401 - it answers for torch.cuda
            import megatron.core.optimizer  # noqa: F401
    if stack.device in DEVICES:
        from accel_testing.simulated.simulate import simulate_plugin

        sys.path.insert(0, str(BACKENDS / stack.device / "tests/stand_in"))
        module = f"stands_for_{stack.device}" if stack.device in ANSWERING else None
        simulate_plugin(stack.device, DEVICES[stack.device], module)


def _by_keyword(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    output = model(input_ids=batch["input_ids"])
    logits = getattr(output, "logits", output)
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), None


def _with_positions(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    logits = model(batch["input_ids"], batch["position_ids"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()), None


def _exchanging(make: Callable[[], Any], accelerator: Accelerator) -> nn.Module:
    """Return a model that attends by DeepSpeed's attention over parts of sequences."""
    from deepspeed.sequence.layer import DistributedAttention

    model, mesh = make(), accelerator.run.mesh
    assert mesh is not None
    for block in model.blocks:
        attend = DistributedAttention(block.attend, mesh.device_mesh["cp"].get_group(), 1, 2)
        block.attend = partial(attend, batch_dim_idx=0)
    return model
