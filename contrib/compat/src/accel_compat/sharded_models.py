"""Models that transformers has sharded while it loaded them, for Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import nn

__all__ = ["adopt", "refuse_whole_states"]

TESTED: Final = "5.24."
"""The transformers whose Trainer was read and run: it asks for a flag of the model, once, when it is made."""


def adopt(model: nn.Module) -> nn.Module:
    """Let transformers' Trainer save and resume a model of `from_pretrained(distributed_config=...)`.

    Call it before `Trainer(...)`, and give `TrainingArguments` `fsdp="full_shard"` and
    `fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}`. Trainer then trains, saves and
    resumes as under FSDP 2, and accel-fsdp adopts the model's shards. With `tp_size` above 1, states must be
    sharded ones; otherwise FULL_STATE_DICT works too.

    Returns:
        The same model.

    Raises:
        RuntimeError: another release of transformers than was tested.
        ValueError: transformers did not shard the model.
    """
    import transformers

    if not transformers.__version__.startswith(TESTED):
        raise RuntimeError(
            f"adopt was tested with transformers {TESTED}*, this is {transformers.__version__}, whose Trainer"
            " may ask a model for something else\nsave weights only: TrainingArguments(save_only_model=True)"
        )
    with_adapters: Any = model
    inside = with_adapters.get_base_model() if hasattr(model, "get_base_model") else with_adapters
    if not getattr(inside, "is_distributed_loading_by_transformers", False):
        raise ValueError(
            f"adopt: transformers did not shard this {type(inside).__name__} as it loaded it\n"
            "load it by from_pretrained(..., distributed_config=DistributedConfig(...)), or leave adopt out"
        )
    inside._is_distributed_loading_by_transformers = False
    if inside.config.distributed_config.tp_size == 1:
        # Its save_pretrained would gather on all ranks what only rank 0 saves; with tp, Trainer reads it.
        inside.config.distributed_config = None
    return model


def refuse_whole_states(model: Any, state_dict_type: Any) -> None:
    """Raise ValueError for whole states of a model that tensor parallelism splits.

    Only rank 0 would enter transformers' `save_pretrained`, which gathers on all ranks.
    """
    layout = getattr(getattr(model, "config", None), "distributed_config", None)
    if layout is not None and layout.tp_size > 1 and "FULL_STATE_DICT" in str(state_dict_type):
        raise ValueError(
            f"this {type(model).__name__} was loaded with tp_size={layout.tp_size}, and its whole state"
            " cannot be saved by rank 0 alone\nset fsdp_config={'state_dict_type': 'SHARDED_STATE_DICT'}"
        )
