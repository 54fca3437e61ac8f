"""Functions around a run whose strategy is `megatron`.

Models, options and loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, evolve
from torch.utils.data import DataLoader

from accel_core import ConfigError
from accel_megatron import building, library, settings
from accel_megatron.building import Chunks
from accel_megatron.checks import of_world
from accel_megatron.config import SPELLINGS
from accel_megatron.datasets import ResumableSampler, indexed_datasets
from accel_megatron.native import NativeModel, _all, _pieces, _placeholder
from accel_megatron.shard_map import Piece

if TYPE_CHECKING:
    from torch import nn

    from accel_core import Accelerator
    from accel_megatron.config import Sized

__all__ = ["build_model", "indexed_loaders", "plugin_of", "reconfigure", "transformer_config"]

_LATE: Final = frozenset(
    {
        "custom_megatron_datasets_provider_function",
        "consumed_samples",
        "eval_iters",
        "eval_interval",
        "train_iters",
        "train_samples",
    }
)
"""Options of loaders, which may be made when a model is there already."""


def transformer_config(accelerator: Accelerator, *, num_layers: int, **what: Any) -> Any:
    """Return a TransformerConfig of the run's degrees, dtypes and other arguments.

    Args:
        accelerator: of the run.
        num_layers: of the whole model.
        what: other fields that define the computation.
    """
    plugin = plugin_of(accelerator)
    virtual = building.chunk_numbers(plugin.config, num_layers)
    return settings.build(accelerator.run, plugin.config, virtual, num_layers=num_layers, **what)


def build_model(
    accelerator: Accelerator,
    provider: Callable[..., nn.Module] | None = None,
    *,
    num_layers: int | None = None,
) -> nn.Module:
    """Return a model to prepare, of which this rank has its own chunks. Collective.

    Its parameters have the names and shapes of the whole model's, and no data.

    Args:
        accelerator: of the run; the strategy is `megatron`.
        provider: (pre_process, post_process, vp_stage) -> chunk; unset: custom_model_provider_function.
        num_layers: of the whole model; needed for virtual pipeline stages only.
    """
    plugin = plugin_of(accelerator)
    config, run = plugin.config, accelerator.run
    provider = provider or config.custom_model_provider_function
    if provider is None:
        raise ConfigError("build_model: no provider\npass one, or set custom_model_provider_function")
    if config.num_layers_per_virtual_pipeline_stage and num_layers is None:
        raise ConfigError("build_model: virtual pipeline stages are cut by layers\npass num_layers=")
    virtual = building.chunk_numbers(config, num_layers or 0)
    library.enter(run, plugin, library.Layout.of(config, virtual))
    raw = building.made(run, config, virtual, provider)
    pieces: dict[nn.Parameter, list[Piece]] = {}
    for chunk in raw:
        for parameter, piece in _pieces(chunk):
            pieces.setdefault(parameter, []).append(piece)
    chunks = Chunks(raw[0].config, raw, {parameter: tuple(found) for parameter, found in pieces.items()})
    model: Any = _placeholder(_all(run, pieces))
    model.chunks, model.adapter = chunks, NativeModel()
    made: nn.Module = model
    return made


def plugin_of(accelerator: Accelerator) -> Any:
    """Return the strategy of the run, if it is this one."""
    from accel_megatron.strategy import Megatron

    for plugin in accelerator.run.plugins.values():
        if isinstance(plugin, Megatron):
            return plugin
    raise ConfigError(f"the strategy of this run is {accelerator.run.stack.default}\nset strategy: megatron")


def reconfigure(accelerator: Accelerator, **options: Any) -> Sized:
    """Set options before a model is prepared.

    Any but the sizes, by which the ranks are divided already.

    For libraries that learn them late. Gives all of the run's. Those of `indexed_loaders` may come later.

    Raises:
        ConfigError: another size was given, a value is refused, or it is too late.
    """
    plugin = plugin_of(accelerator)
    for name, dimension in SPELLINGS.items():
        size, asked = getattr(plugin.config, dimension, 1), options.get(name)
        if asked not in (None, size):
            raise ConfigError(
                f"megatron.{name} is {asked}, and the run has divided its ranks with parallelism.{dimension}"
                f" {size} already\ngive sizes to the Accelerator when it is made"
            )
    changed: Sized = evolve(plugin.config, **options)
    before, after = asdict(plugin.config, recurse=False), asdict(changed, recurse=False)
    late = [name for name in after if after[name] != before[name] and name not in _LATE]
    if late and plugin.engines:
        raise ConfigError(
            f"megatron.{late[0]}: a model is prepared already, with {before[late[0]]!r}, not"
            f" {after[late[0]]!r}\nset it before, or when the Accelerator is made"
        )
    reasons = [*of_world(changed, accelerator.run.world), *settings.refuse_unknown(changed)]
    if reasons:
        raise ConfigError(reasons[0])
    plugin.config = changed
    return changed


def indexed_loaders(
    accelerator: Accelerator,
    data_path: str | Sequence[str] = (),
    *,
    micro_batch_size: int,
    num_workers: int = 0,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """Return prepared DataLoaders to train, validate and test with, or None.

    As many samples as the options say.

    A pass of the first is the whole training, less `consumed_samples`; a pass of the other two `eval_iters`
    batches, and the next pass goes on behind them. They are saved and resumed as all prepared loaders are,
    by positions that count from `consumed_samples` on. Collective.

    Args:
        accelerator: of the run; section `megatron` has train_iters or train_samples.
        data_path: as in `indexed_datasets`; none if custom_megatron_datasets_provider_function is set.
        micro_batch_size: samples of a micro-batch; a batch has num_micro_batches of them.
        num_workers: of each DataLoader.
        options: others of `indexed_datasets`.
    """
    config: Sized = plugin_of(accelerator).config
    rows, readers = micro_batch_size * config.micro_batches, accelerator.run.topology.readers
    counts = _counts(config, rows * readers)
    datasets = _datasets(config, counts, data_path, options)
    # Consumed samples of training, validation and test; missing numbers are 0.
    starts = (*config.consumed_samples, 0, 0, 0)
    passes = (counts[0] - starts[0], *(config.eval_iters * rows * readers,) * 2)
    if passes[0] <= 0:
        raise ConfigError(
            f"megatron: of {counts[0]} samples to train on consumed_samples leaves none\n"
            "raise train_iters or train_samples"
        )
    loaders = [
        None
        if dataset is None
        else accelerator.prepare_data_loader(
            DataLoader(
                dataset,
                rows * readers if accelerator.run.config.data.split_batches else rows,
                sampler=ResumableSampler(len(dataset), start, each),
                num_workers=num_workers,
                drop_last=True,
            )
        )
        for dataset, start, each in zip(datasets, starts, passes, strict=False)
    ]
    train, valid, test = loaders
    return train, valid, test


def _datasets(
    config: Sized,
    counts: tuple[int, int, int],
    data_path: str | Sequence[str],
    options: Mapping[str, Any],
) -> tuple[Any, ...]:
    provide = config.custom_megatron_datasets_provider_function
    if provide is None:
        return indexed_datasets(data_path, samples=counts, **options)
    if data_path or options:
        raise ConfigError(
            "indexed_loaders: custom_megatron_datasets_provider_function makes the datasets itself\n"
            "leave out data_path and what else describes them"
        )
    datasets = tuple(provide(counts))
    if len(datasets) != 3:
        raise ConfigError(
            f"custom_megatron_datasets_provider_function gave {len(datasets)} dataset(s)\n"
            "return three, to train, validate and test on; None for what there is not"
        )
    return datasets


def _counts(config: Sized, batch: int) -> tuple[int, int, int]:
    """Return Megatron-LM's numbers of samples to train, validate and test on.

    `batch`: of all ranks.
    """
    samples = config.train_samples
    if config.train_iters is not None:
        samples = config.train_iters * batch
    if samples is None:
        raise ConfigError(
            "indexed_loaders: nothing says how long training is\nset train_iters or train_samples"
        )
    evaluations = samples // batch // config.eval_interval + 1
    return samples, evaluations * config.eval_iters * batch, config.eval_iters * batch
