"""Megatron's stand-ins and train steps as Accelerate has them.

accel-megatron runs them.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from accel_compat import runs
from accel_compat.unsupported import NotServedError, of_package

MegatronLMDummyScheduler = of_package(
    "accel_megatron", "accelerate.utils.megatron_lm", "MegatronLMDummyScheduler"
)


class MegatronLMDummyDataLoader:
    """Stand-in for indexed datasets.

    Give it to `prepare` three times, to train, validate and test.

    Args:
        dataset_kwargs: data_path, seq_length, micro_batch_size, split or splits_string, vocab_size, eod, ...
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        self.dataset_args = {**dataset_kwargs, "megatron_dataset_flag": True}


class AbstractTrainStep(ABC):  # noqa: B024 - as Accelerate's: programs override what they need
    """A step that reads a micro-batch, runs a megatron-core model, computes the loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """Return a function from the iterator of micro-batches to a model's inputs.

        `forward_step` calls it.
        """
        return None

    def get_forward_step_func(self) -> Any:
        """Give a function of (batches, model) that returns (output, loss function of it)."""
        return None

    def get_loss_func(self, accelerator: Any) -> Any:
        """Give the loss function of `forward_step`."""
        return None


def _told(method: Callable[..., Any], *values: Any) -> Any:
    """Call it with as many of the last values as it takes: releases differ."""
    kinds = [each.kind for each in inspect.signature(method).parameters.values()]
    takes = len(values) if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds)
    return method(*values[len(values) - takes :])


class GPTTrainStep(AbstractTrainStep):
    """Tokens, and the token that follows each, through a GPTModel.

    It takes Megatron's arguments, after an accelerator or alone.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(type(self).__name__)
        *accelerator, self.args = given
        one = accelerator[0] if accelerator else None
        flag = self.args.megatron_dataset_flag
        self.get_batch = _told(self.get_batch_func, one, flag)
        self.loss_func = _told(self.get_loss_func, one, self.args.pretraining_flag, self.args.num_labels)
        self.forward_step = _told(
            self.get_forward_step_func, self.args.pretraining_flag, self.args.bert_binary_head
        )

    def get_batch_func(self, *_: Any) -> Any:
        return self.args.custom_get_batch_function or self._read

    def get_loss_func(self, *_: Any) -> Any:
        return self.args.custom_loss_function or _mean

    def get_forward_step_func(self) -> Any:
        def forward_step(batches: Iterator[Any], model: Any) -> tuple[Any, Any]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(batches)
            output = model(tokens, positions, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    def _read(self, batches: Iterator[Any]) -> tuple[Any, ...]:
        """Tokens, labels, loss mask, attention mask (true where hidden) and positions."""
        batch = next(batches)
        if "shift_labels" in batch:  # of accel-megatron's indexed datasets
            tokens, labels = batch["input_ids"], batch["shift_labels"]
            counts = labels != -100
        else:
            text = batch["text"] if self.args.megatron_dataset_flag else self._ended(batch["input_ids"])
            tokens, labels = text[:, :-1].contiguous(), text[:, 1:]
            counts = tokens != self.args.eos_token_id
        length = tokens.shape[1]
        hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        return tokens, labels.where(labels >= 0, 0).contiguous(), counts.float(), hidden, positions

    def _ended(self, ids: Tensor) -> Tensor:
        return torch.cat([ids, ids.new_full((len(ids), 1), self.args.eos_token_id)], 1)


def _mean(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the mean over tokens that count."""
    counts = loss_mask.view(-1).float()
    loss = (output_tensor.float().view(-1) * counts).sum() / counts.sum()
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}


class ChosenStep:
    """Train step that Accelerate's plugin asks for: its own class, or that of a GPTModel.

    It is made in the first micro-batch, as it reads the prepared model's config.
    """

    def __init__(self, plugin: Any, options: Any) -> None:
        self.plugin, self.options = plugin, options
        self.step: Any = None

    def forward_step(self, batches: Iterator[Any], model: Any) -> tuple[Any, Any]:
        """Run one micro-batch; megatron-core's schedule calls it."""
        if self.step is None:
            self.step = self._made(model)
        found: tuple[Any, Any] = self.step.forward_step(batches, model)
        return found

    def _made(self, model: Any) -> Any:
        while hasattr(model, "module"):
            model = model.module
        kind, own = type(model).__name__, self.plugin.custom_train_step_class
        args = SimpleNamespace(**_arguments(self.plugin), model_type_name=kind.removesuffix("Model").lower())
        if own is not None:
            return own(args, **(self.plugin.custom_train_step_kwargs or {}))
        if kind != "GPTModel":
            raise NotServedError(
                f"MegatronLMPlugin: there is no train step for a {kind}\ngive custom_train_step_class"
            )
        return GPTTrainStep(args)


def _arguments(plugin: Any) -> Mapping[str, Any]:
    """Megatron-LM's arguments that train steps read."""
    configs = [getattr(model, "config", None) for unit in runs.current().units for model in unit.given]
    ends = [end for config in configs if (end := getattr(config, "eos_token_id", None)) is not None]
    usual = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "bert_binary_head"), False)
    usual |= {"pretraining_flag": True, "model_return_dict": True}
    more = {"eos_token_id": ends[0] if ends else -1, "num_labels": None, "vocab_file": None}
    return {**usual, **more, **vars(plugin), **(plugin.other_megatron_args or {})}


def _readers() -> Any:
    return import_module("megatron.core.parallel_state").get_data_parallel_group()


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """Return the losses' means over ranks of different data. Collective there."""
    found = torch.cat([loss.detach().clone().view(1) for loss in losses])
    torch.distributed.all_reduce(found, group=_readers())
    return found / torch.distributed.get_world_size(_readers())
