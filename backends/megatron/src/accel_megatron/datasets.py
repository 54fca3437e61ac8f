"""Samples for a prepared model from megatron-core's indexed datasets.

Those are pairs of .bin and .idx files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import define, frozen
from torch.utils.data import Dataset, Sampler

from accel_megatron.library import quiet
from accel_megatron.losses import IGNORED

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["ResumableSampler", "indexed_datasets", "inputs_of"]


class Samples(Dataset[dict[str, "Tensor"]]):
    """Samples of a GPTDataset.

    `input_ids`, and in `shift_labels` the token that follows each.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = self.inner[int(index)]
        return inputs_of({name: found[name] for name in ("tokens", "labels", "loss_mask")})


def inputs_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs of a model from a batch or sample of megatron-core's datasets.

    Batches of other datasets stay as they are.

    Such have `tokens`, and the `labels` that follow, counted as `loss_mask` says; of old `text`, which is
    both, a token longer.
    """
    inputs = dict(batch)
    if "text" in inputs:
        text = inputs.pop("text")
        inputs |= {"tokens": text[..., :-1], "labels": text[..., 1:]}
    if "tokens" not in inputs:
        return inputs
    inputs["input_ids"] = inputs.pop("tokens")
    labels, counts = inputs.pop("labels", None), inputs.pop("loss_mask", None)
    if labels is not None:
        inputs["shift_labels"] = labels if counts is None else labels.masked_fill(counts == 0, IGNORED)
    return inputs


@frozen
class _Tokens:
    """The part of a tokenizer that megatron-core's datasets use."""

    eod: int
    vocab_size: int

    @property
    def pad(self) -> int:
        return -1

    @property
    def unique_identifiers(self) -> dict[str, int]:
        return {"eod": self.eod, "vocab_size": self.vocab_size}


def indexed_datasets(
    data_path: str | Sequence[str],
    *,
    samples: tuple[int, int, int],
    seq_length: int,
    vocab_size: int,
    eod: int,
    split: str = "969,30,1",
    weights: Sequence[float] | None = None,
    seed: int = 1234,
    path_to_cache: str | None = None,
    eod_mask_loss: bool = False,
) -> tuple[Samples | None, Samples | None, Samples | None]:
    """Datasets to train, validate and test on, to make DataLoaders of.

    None for a share of nothing.

    Collective: rank 0 builds the index of each, the others read it from the cache.

    Args:
        data_path: of a pair of files, without their endings, or of several.
        samples: how many are drawn for each of the three.
        seq_length: tokens of a sample.
        vocab_size: of the tokenizer.
        eod: the token that ends a document.
        split: shares of the documents.
        weights: of several paths.
        seed: of the order.
        path_to_cache: folder for indexes; unset: beside the files.
        eod_mask_loss: ends of documents do not count in the loss.
    """
    paths = [data_path] if isinstance(data_path, str) else list(data_path)
    made = _build(
        list(samples),
        random_seed=seed,
        sequence_length=seq_length,
        blend=(paths, None if weights is None else list(weights)),
        split=split,
        path_to_cache=path_to_cache,
        tokenizer=_Tokens(eod, vocab_size),
        eod_mask_loss=eod_mask_loss,
    )
    train, valid, test = (None if each is None else Samples(each) for each in made)
    return train, valid, test


def _build(samples: list[int], **options: Any) -> Sequence[Any]:
    with quiet():
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

        plain = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "create_attention_mask"), False)
        config = GPTDatasetConfig(**plain, **options)
        found: Sequence[Any] = BlendedMegatronDatasetBuilder(
            GPTDataset, samples, lambda: True, config
        ).build()
    return found


@define(eq=False)
class ResumableSampler(Sampler[int]):
    """Samples in their order from `start` on, `each` of them a pass.

    The next pass goes on behind it.
    """

    samples: int
    start: int
    each: int
    passes: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of passes so far."""
        self.passes = epoch

    def __len__(self) -> int:
        return self.each

    def __iter__(self) -> Iterator[int]:
        first = self.start + self.passes * self.each
        return (number % self.samples for number in range(first, first + self.each))
