"""Models in stages on several processes, for inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_compat import runs
from accel_compat.big_models.device_maps import infer_auto_device_map
from accel_compat.modeling.sizes import calculate_maximum_sizes
from accel_compat.modeling.wrappers import convert_bytes
from accel_compat.notices import warn_once
from accel_compat.packages import load
from accel_compat.state.operations import ignorant_find_batch_size, pad_input_tensors
from accel_core import Accelerator, ops


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
) -> dict[str, int | str]:
    """Return a map that spreads a model over devices of about equal memory.

    It has an entry for each module that is not split.
    """
    if num_processes > 1 and max_memory is None:
        size, largest = calculate_maximum_sizes(model)
        value, unit = convert_bytes((size + largest[0]) / num_processes).split(" ")
        share = math.ceil(float(value)) * 1.1
        max_memory = dict.fromkeys(range(num_processes), int(share) if unit == "bytes" else f"{share} {unit}")
    limits = max_memory if num_processes > 1 else None
    return infer_auto_device_map(model, limits, no_split_module_classes, clean_result=False)


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any] | None = (),  # type: ignore[assignment]
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Cut a model into stages, one a process, and have its call run them. Collective.

    All processes call the model: the first gives the inputs, the last gets the output, of as many rows as
    the inputs have. One process has one stage, the model as it is. Stages send one tensor, so the first call
    of an encoder-decoder, or of another model whose layers give several values, is an error.

    split_points: names of the modules at which stages but the first begin; "auto" balances their sizes.
    example_args, example_kwargs: mean nothing here, as nothing is traced.
    num_chunks: parts of a batch that follow each other through the stages. Default: one a process.
    gather_output: all processes get the output.

    Raises:
        PluginError: accel-fsdp is not installed, which has the pipeline.
        ValueError: the model cannot be cut into as many stages as there are processes.
    """
    state = runs.find_or_make(cpu=False)
    count = state.world.size
    if split_points == "auto":
        whole: Any = no_split_module_classes or getattr(model, "_no_split_modules", None)
        split_points = _balanced(model, count, whole)
    points = list(split_points or ())
    model.hf_split_points = points  # type: ignore[assignment]
    if count == 1:
        return model
    if len(points) != count - 1:
        raise ValueError(
            f"prepare_pippy: {len(points)} split points make {len(points) + 1} stages, and there are {count}"
            " processes\nname as many modules as there are processes but the first"
        )
    plugin = load("accel_fsdp:FullyShardedDataParallelPlugin", "prepare_pippy")
    config = plugin(fsdp_version=2, pp_size=count, pp_schedule="GPipe", pp_split_points=points)
    accelerator = Accelerator(strategy="fsdp", plugins=[config], cpu=state.device.type == "cpu")
    staged: nn.Module = accelerator.prepare(model)
    staged.__dict__["_pipeline"] = _Pipeline(accelerator, num_chunks or count, bool(gather_output))
    staged.__class__ = type(type(staged).__name__, (_Staged, type(staged)), {})
    return staged


def _balanced(model: nn.Module, count: int, whole: list[str] | None) -> list[str]:
    """Return where stages but the first begin.

    Raises:
        ValueError: the model has too few modules.
    """
    places = generate_device_map(model, count, no_split_module_classes=whole)
    first = {place: name for name, place in reversed(places.items())}
    if missing := [stage for stage in range(1, count) if stage not in first]:
        raise ValueError(
            f"prepare_pippy: {type(model).__name__} cannot be cut into {count} stages: nothing is left for"
            f" stage {missing[0]}\nname split points, or start fewer processes"
        )
    return [first[stage] for stage in range(1, count)]


class _Staged:
    """Put before a model's class: its call runs the stages of all processes."""

    _pipeline: _Pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline.running:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._pipeline.run(self, *args, **kwargs)


class _Pipeline:
    """Takes a batch through the stages, in chunks.

    gathers: all processes get the output, not the last one only.
    """

    def __init__(self, accelerator: Accelerator, chunks: int, gathers: bool) -> None:
        self.accelerator, self.chunks, self.gathers = accelerator, chunks, gathers
        self.running = False

    def run(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the first process's inputs. Collective.

        Returns the output on the processes that get it, else None.
        """
        run, device = self.accelerator.run, self.accelerator.device
        last = self.accelerator.num_processes - 1
        given = ops.broadcast_object_list([ops.send_to_device((args, kwargs), "cpu")], run=run)[0]
        args, kwargs = ops.send_to_device(given, device)
        sizes = map(ignorant_find_batch_size, (*args, *kwargs.values()))
        size = next((size for size in sizes if size is not None), None)
        if size is None:
            raise ValueError(
                "Could not find batch size from args or kwargs\n"
                "give tensors to the model on the first process"
            )
        batches = self._cut(pad_input_tensors((args, kwargs), size, self.chunks), size)
        self.running = True
        try:
            found = self.accelerator.forward_backward(
                model,
                batches,
                lambda module, batch: (torch.zeros((), device=device), module(*batch[0], **batch[1])),
                microbatches=self.chunks,
                forward_only=True,
            )
        finally:
            self.running = False
        output: Any = None
        if self.accelerator.process_index == last:
            outputs = [_without_caches(output) for output in found.outputs]
            output = _map(ops.concatenate(outputs), lambda tensor: tensor[:size])
        if self.gathers:
            told = [ops.send_to_device(output, "cpu")]
            output = ops.send_to_device(ops.broadcast_object_list(told, last, run=run)[0], device)
        return output

    def _cut(self, inputs: Any, size: int) -> list[Any]:
        """Cut the tensors of a batch's size along their first dimension.

        Other values go with each chunk.
        """
        rows = size + -size % self.chunks
        length = rows // self.chunks

        def part(number: int) -> Callable[[Tensor], Tensor]:
            start = number * length
            return lambda tensor: (
                tensor[start : start + length] if tensor.ndim and tensor.shape[0] == rows else tensor
            )

        return [_map(inputs, part(number)) for number in range(self.chunks)]


def _without_caches(output: Any) -> Any:
    """Leave out what is no tensor, such as the cache of transformers' decoders."""
    if not isinstance(output, Mapping):
        return output
    lost = [key for key, value in output.items() if not isinstance(value, (Tensor, Mapping, list, tuple))]
    if not lost:
        return output
    warn_once(
        f"prepare_pippy: the output has no {', '.join(map(str, lost))}: this process has its own layers'"
        " alone, for one chunk. Give the model use_cache=False"
    )
    kept = {key: value for key, value in output.items() if key not in lost}
    return type(output)(**kept)  # a ModelOutput takes its fields


def _map(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    mapped: Any = ops.recursively_apply(change, tree)
    return mapped
