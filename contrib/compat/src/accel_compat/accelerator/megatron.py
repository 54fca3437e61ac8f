"""Arguments of `prepare` under Megatron: larger batches, loaders for stand-ins."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_compat.loaders.prepared import AcceleratedLoader, wrap_loader
from accel_compat.modeling.megatron_steps import MegatronLMDummyDataLoader
from accel_compat.packages import load
from accel_core import PreparedLoader

_SPELLED = {"splits_string": "split"}
_LEFT = ("megatron_dataset_flag", "micro_batch_size")


class Walked(AcceleratedLoader):
    """A loader that `next` walks, pass after pass."""

    def __next__(self) -> Any:
        if self.__dict__.get("_walk") is None:
            self.__dict__["_walk"] = iter(self)
        try:
            return next(self.__dict__["_walk"])
        except StopIteration:
            self.__dict__["_walk"] = iter(self)
            return next(self.__dict__["_walk"])


def for_megatron(accelerator: Any, things: Sequence[Any]) -> list[Any]:
    """Give batches of all micro-batches, and indexed loaders in place of stand-ins.

    What was set on the plugin since the Accelerator was made counts from here on, but no degrees.
    """
    plugin = getattr(accelerator.state, "megatron_lm_plugin", None)
    if plugin is None:
        return list(things)
    stands = [each for each in things if isinstance(each, MegatronLMDummyDataLoader)]
    if stands:
        plugin.megatron_dataset_flag = True
    ours = load("accel_megatron:reconfigure", "MegatronLMPlugin")(accelerator, **plugin.news())
    sizes = [each.batch_size for each in things if _is_plain(each)]
    sizes = [each.dataset_args["micro_batch_size"] for each in stands[:1]] or sizes
    if sizes:
        plugin.micro_batch_size = min(sizes) if plugin.is_train_batch_min else max(sizes)
        plugin.data_parallel_size = accelerator.run.topology.readers
        rows = plugin.micro_batch_size * ours.micro_batches
        plugin.global_batch_size = rows * plugin.data_parallel_size
        things = [_of_size(each, rows) if _is_plain(each) else each for each in things]
    loaders = iter(_indexed(accelerator, stands[0], plugin, things) if stands else ())
    return [next(loaders) if isinstance(each, MegatronLMDummyDataLoader) else each for each in things]


def _is_plain(thing: Any) -> bool:
    """Tell whether a loader's batches are micro-batches."""
    if not isinstance(thing, DataLoader) or isinstance(thing, PreparedLoader) or thing.batch_size is None:
        return False
    return not type(thing.sampler).__module__.startswith("accel_megatron.")  # of indexed_loaders


def _of_size(loader: Any, size: int) -> Any:
    made = copy.copy(loader)  # torch lets nobody set these, but has them in no other place
    made.__dict__["batch_size"] = size
    if made.batch_sampler is not None:
        made.__dict__["batch_sampler"] = BatchSampler(loader.sampler, size, loader.drop_last)
    return made


def _indexed(
    accelerator: Any, stands: MegatronLMDummyDataLoader, plugin: Any, things: Sequence[Any]
) -> list[Any]:
    models = [*things, *(model for unit in accelerator.run.units for model in unit.given)]
    config = next((each.config for each in models if hasattr(each, "config")), None)
    given = {_SPELLED.get(name, name): value for name, value in stands.dataset_args.items()}
    options = {name: value for name, value in given.items() if name not in _LEFT}
    options.setdefault("vocab_size", getattr(config, "vocab_size", None))
    options.setdefault("eod", getattr(config, "eos_token_id", None))
    if plugin.eod_mask_loss:
        options["eod_mask_loss"] = True
    if plugin.custom_megatron_datasets_provider_function is not None:
        options = {}
    made = load("accel_megatron:indexed_loaders", "MegatronLMDummyDataLoader")(
        accelerator, micro_batch_size=plugin.micro_batch_size, **options
    )
    for each in made:
        if each is not None:
            wrap_loader(each).__class__ = Walked
    return list(made)
