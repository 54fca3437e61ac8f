"""A megatron-core model of the user's own, by the names that megatron-core's checkpoints give its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor, nn

from accel_core import ConfigError
from accel_megatron import building, library, settings
from accel_megatron.building import Chunks
from accel_megatron.pieces import Piece

if TYPE_CHECKING:
    from accel_core import Accelerator
    from accel_megatron.config import MegatronLMPlugin

__all__ = ["Answer", "Provided", "build_model", "plugin_of", "reconfigure", "transformer_config"]

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
_METADATA = {"non_homogeneous_layers": True, "singleton_local_shards": True}
"""Of sharded_state_dict: layers and experts by their own global numbers, not stacked."""


@frozen
class Answer:
    """What `model(**batch)` gives."""

    loss: Tensor | None
    logits: Tensor | None


class Provided:
    """In the place of a twin: the model takes and gives what it takes and gives."""

    def judge(self, output: Any, inputs: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Losses of tokens, where labels were given, are averaged as `loss_mask` says."""
        if inputs.get("labels") is None:
            return None, output
        mask = inputs.get("loss_mask")
        weights = torch.ones_like(output) if mask is None else mask.to(output.dtype)
        return (output * weights).sum() / weights.sum(), None

    def answer(self, loss: Tensor | None, logits: Tensor | None) -> Answer:
        """Both, by name."""
        return Answer(loss, logits)

    def call(self, chunk: nn.Module, inputs: Mapping[str, Any], *, last: bool, logits: bool) -> Any:
        """The chunk's own forward."""
        return chunk(**inputs)


def transformer_config(accelerator: Accelerator, *, num_layers: int, **what: Any) -> Any:
    """A TransformerConfig with the degrees, dtypes and `other_megatron_args` of the run filled in.

    Args:
        accelerator: of the run.
        num_layers: of the whole model.
        what: other fields that say what is computed.
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
    """A model to make an optimizer of and to prepare, of which this rank has its own chunks. Collective.

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
        raise ConfigError(
            "build_model: there is no provider\npass one, or set custom_model_provider_function"
        )
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
    model.chunks, model.twin = chunks, Provided()
    made: nn.Module = model
    return made


def plugin_of(accelerator: Accelerator) -> Any:
    """The strategy of the run, if it is this one."""
    from accel_megatron.strategy import Megatron

    for plugin in accelerator.run.plugins.values():
        if isinstance(plugin, Megatron):
            return plugin
    raise ConfigError(f"the strategy of this run is {accelerator.run.stack.default}\nset strategy: megatron")


def reconfigure(accelerator: Accelerator, **options: Any) -> MegatronLMPlugin:
    """Set options before a model is prepared: any but the degrees, by which the ranks are divided already.

    For libraries that learn them late. Gives all of the run's. Those of `indexed_loaders` may come later.

    Raises:
        ConfigError: a degree was given, a value is refused, or it is too late.
    """
    plugin = plugin_of(accelerator)
    changed: MegatronLMPlugin = evolve(plugin.config, **options)
    if library.Layout.of(changed, None) != library.Layout.of(plugin.config, None):
        raise ConfigError(
            f"megatron: the run has divided its ranks into {library.Layout.of(plugin.config, None)}"
            f" already, not into {library.Layout.of(changed, None)}\n"
            "give degrees to the Accelerator when it is made"
        )
    before, after = asdict(plugin.config, recurse=False), asdict(changed, recurse=False)
    late = [name for name in after if after[name] != before[name] and name not in _LATE]
    if late and plugin.engines:
        raise ConfigError(
            f"megatron.{late[0]}: a model is prepared already, with {before[late[0]]!r}, not"
            f" {after[late[0]]!r}\nset it before, or when the Accelerator is made"
        )
    if reasons := list(settings.refuse_unknown(changed)):
        raise ConfigError(reasons[0])
    plugin.config = changed
    return changed


def _pieces(chunk: Any) -> Iterator[tuple[nn.Parameter, Piece]]:
    """What each row of each parameter is of the whole model, as the chunk's own sharded_state_dict says."""
    with library.quiet():
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

        found = list(nested_values(chunk.sharded_state_dict(metadata=dict(_METADATA))))
    made = [
        part
        for each in found
        if isinstance(each, ShardedTensorFactory)
        for part in nested_values(each.build())
    ]
    homes = {parameter.untyped_storage().data_ptr(): parameter for parameter in chunk.parameters()}
    for each in (*found, *made):
        if isinstance(each, ShardedTensor) and each.data is not None:
            parameter = homes.get(each.data.untyped_storage().data_ptr())
            if parameter is not None:
                yield parameter, _piece(each, parameter)


def _piece(part: Any, parameter: nn.Parameter) -> Piece:
    before = part.data.storage_offset() - parameter.storage_offset()
    return Piece(
        name=part.key,
        shape=tuple(part.global_shape),
        offset=tuple(part.global_offset),
        first=before // max(1, parameter[0].numel()),
        rows=part.data.shape[0],
    )


def _all(run: Any, pieces: Mapping[nn.Parameter, Sequence[Piece]]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Name -> (shape, dtype) of the weights of all ranks."""
    mine = {
        piece.name: (piece.global_shape, parameter.dtype)
        for parameter, found in pieces.items()
        for piece in found
    }
    merged: dict[str, tuple[tuple[int, ...], Any]] = {}
    for theirs in run.collectives("control").all_gather_object(mine):
        merged |= {name: value for name, value in theirs.items() if name not in merged}
    return merged


def _placeholder(weights: Mapping[str, tuple[tuple[int, ...], Any]]) -> Any:
    root = nn.Module()
    for name, (shape, dtype) in weights.items():
        home, (*path, last) = root, name.split(".")
        for step in path:
            if step not in home._modules:
                home.add_module(step, nn.Module())
            home = home.get_submodule(step)
        home.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    return root
