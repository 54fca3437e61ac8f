"""Reads DeepSpeed's checkpoints, universal ones too, without DeepSpeed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Final

import torch
from attrs import define, field
from torch import Tensor

from accel_checkpoint_tools.contents import Contents, Source
from accel_checkpoint_tools.fitting import (
    Group,
    put_no_optimizer,
    put_no_plugins,
    put_optimizer,
    put_weights,
)
from accel_checkpoint_tools.trusted import Fields, read_torch
from accel_core import CheckpointError, Outline

__all__ = ["read"]

_CLASSES: Final = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
)
_STAND_INS: Final[list[Any]] = [(type(name.rpartition(".")[2], (Fields,), {}), name) for name in _CLASSES]
"""DeepSpeed's names that such a file may hold; here they become fields."""
_COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
_SCALE: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

Cuts = Mapping[str, tuple[int, int]]
"""Parameter name -> (first element of it in a flat tensor, how many)."""
Shapes = Mapping[str, Sequence[int]]


@define
class Found:
    """Contents of a folder.

    weights: of both precisions, the masters. state: by parameter name.
    """

    weights: dict[str, Source] = field(factory=dict)
    state: dict[str, dict[str, Source]] = field(factory=dict)
    groups: list[Group] = field(factory=list)
    scale: Any = None


def read(folder: Path, contents: Contents, unit: str) -> list[str]:
    """Put what `folder` holds into a unit of a checkpoint of the same run.

    Gives what is left out.

    Raises:
        CheckpointError: a file is damaged, holds code, or does not fit the run.
    """
    tag = folder / "latest"
    folder = folder / tag.read_text().strip() if tag.exists() else folder
    try:
        return list(_read(folder, contents, unit))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is not laid out as expected (elastic, or of another version?): {error!r}\n"
            "make a universal checkpoint of it with DeepSpeed's ds_to_universal, and import that",
            path=str(folder),
        ) from error


def _read(folder: Path, contents: Contents, unit: str) -> Iterator[str]:
    mains = [_load(file) for file in _files(folder, "*model_states.pt")]
    found = Found(_live(mains))
    if (folder / "zero").is_dir():
        _universal(folder / "zero", mains[0], found)
    elif files := _files(folder, "*_optim_states.pt", several=True):
        ranks = [_load(file) for file in files]
        if (ranks[0].get("ds_config") or {}).get("zero_optimization", {}).get("round_robin_gradients"):
            raise CheckpointError(
                f"{folder}: round_robin_gradients lays parameters out in an order not known here\n"
                "train on under DeepSpeed without it, and import what that saves",
                path=str(folder),
            )
        _zero([rank["optimizer_state_dict"] for rank in ranks], mains[0]["param_shapes"], found)
    # Without ZeRO the optimizer's state is in the model's file.
    elif mains[0].get("optimizer"):
        _stage_0(mains[0]["optimizer"], contents, unit, found)
    put_weights(contents, unit, found.weights, str(folder))
    yield from put_no_plugins(contents, [unit])
    described = contents.state["units"][unit]
    _count_steps(found)
    if found.groups:
        groups = list(_with_frozen(found.groups, described["optimizers"][0]["groups"]))
        put_optimizer(contents, unit, 0, groups, found.state, str(folder))
    else:
        put_no_optimizer(contents, unit)
    _own_entries(contents, unit, mains[0], found.scale)
    yield from _left_out(mains[0], described)
    if not found.groups:
        yield "the optimizer's state: it is not in there, and begins anew"


# -- files -----------------------------------------------------------------------------------------


def _files(folder: Path, pattern: str, *, several: bool = False) -> list[Path]:
    """By rank. What only a part of the model is in is refused."""
    found = sorted(folder.glob(pattern), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
    parts = [file.name for file in found if "expert" in file.name or "mp_rank_00" not in file.name]
    parts += [file.name for file in folder.glob("layer_*")]
    if parts or not (found or several):
        reason = (
            f"{parts[0]} holds a part of the model's layers or experts" if parts else f"it has no {pattern}"
        )
        raise CheckpointError(
            f"{folder}: {reason}\ngive a folder that save_checkpoint wrote for data parallelism and ZeRO",
            path=str(folder),
        )
    return found


def _load(file: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals(_STAND_INS):
        found: dict[str, Any] = read_torch(file, str(file))
    return found


def _live(mains: Sequence[Mapping[str, Any]]) -> dict[str, Source]:
    """Weights as forward computed with them, and buffers.

    In stage 3 only what is frozen is there.
    """
    shared, pieces = (
        mains[0].get("shared_params") or {},
        [main.get("frozen_param_fragments") for main in mains],
    )
    found = {
        name: Source.of(tensor)
        for name, tensor in mains[0]["module"].items()
        if name not in shared and (tensor.numel() or name in (mains[0].get("buffer_names") or ()))
    }
    if pieces[0] and len(mains) > 1:
        shapes: Shapes = mains[0]["frozen_param_shapes"]
        found |= _joined([{name: piece[name] for name in shapes} for piece in pieces if piece], shapes)
    return found


def _joined(ranks: Sequence[Mapping[str, Tensor]], shapes: Shapes) -> dict[str, Source]:
    """Return the sources of tensors of which each rank has a piece; the last has some elements too many."""
    found = {}
    for name, shape in shapes.items():
        pieces = [rank[name].view(-1) for rank in ranks if name in rank]
        if sum(piece.numel() for piece in pieces) < math.prod(shape):
            raise ValueError(f"{name} of shape {list(shape)} is not whole")
        outline = Outline("like_param", tuple(shape), str(pieces[0].dtype).removeprefix("torch."))
        found[name] = Source(outline, partial(_cat, pieces, shape))
    return found


def _cat(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    return torch.cat([*pieces])[: math.prod(shape)].view(tuple(shape))


# -- the optimizer -------------------------------------------------------------------------------


def _zero(ranks: Sequence[Mapping[str, Any]], listed: Sequence[Shapes], found: Found) -> None:
    """ZeRO 1 to 3: each rank has a part of each flat tensor, and of its state."""
    sharded = "fp32_flat_groups" in ranks[0]
    key, inner = ("fp32_flat_groups", "optimizer_state_dict") if sharded else _BELOW_3
    parts: list[dict[str, dict[str, Tensor]]] = []
    for rank in ranks:
        cuts = [_even(shapes, len(ranks)) for shapes in listed] if sharded else _told(rank)
        states = rank[inner]["state"]
        own: dict[str, dict[str, Tensor]] = {}
        for number, (flat, cut) in enumerate(zip(rank[key], cuts, strict=True)):
            for what, value in {"": flat, **states.get(number, {})}.items():
                own.setdefault(what, {}).update(_pieces(value, cut))
        parts.append(own)
    for number, shapes in enumerate(listed):
        found.weights |= _joined([part[""] for part in parts], shapes)
        for what, value in ranks[0][inner]["state"].get(number, {}).items():
            for name, source in _of_all([part[what] for part in parts], shapes, value).items():
                found.state.setdefault(name, {})[what] = source
    found.groups, found.scale = _groups(ranks[0][inner]["param_groups"], listed), ranks[0].get("loss_scaler")


_BELOW_3: Final = ("single_partition_of_fp32_groups", "base_optimizer_state")


def _told(rank: Mapping[str, Any]) -> list[Cuts]:
    mappings = rank["param_slice_mappings"]
    return [{name: (cut.start, cut.numel) for name, cut in mapping.items()} for mapping in mappings]


def _even(shapes: Shapes, ranks: int) -> Cuts:
    """Stage 3.

    Each parameter cut into as many equal pieces as there are ranks, these laid end to end.
    """
    sizes = [-(-math.prod(shape) // ranks) for shape in shapes.values()]
    return dict(zip(shapes, zip(accumulate([0, *sizes]), sizes, strict=False), strict=True))


def _pieces(value: Any, cuts: Cuts) -> dict[str, Tensor]:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return {name: torch.as_tensor(value, dtype=torch.float32) for name in cuts}
    return {name: value[start : start + size] for name, (start, size) in cuts.items()}


def _of_all(ranks: Sequence[Mapping[str, Tensor]], shapes: Shapes, value: Any) -> dict[str, Source]:
    if isinstance(value, Tensor) and value.ndim:
        return _joined(ranks, shapes)
    return {name: Source.of(next(rank[name] for rank in ranks if name in rank)) for name in shapes}


def _groups(described: Sequence[Mapping[str, Any]], listed: Sequence[Shapes]) -> list[Group]:
    """Name the flat tensors that a group has by number."""
    return [
        ([name for number in group["params"] for name in listed[number]], _hyperparameters(group))
        for group in described
    ]


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what DeepSpeed's own Adam has besides torch's."""
    return {key: group[key] for key in group if key not in ("params", "param_names", "bias_correction")}


def _count_steps(found: Found) -> None:
    """Give each parameter its group's number of steps.

    A number that no parameter can take stays with its group.
    """
    for number, (names, values) in enumerate(found.groups):
        states = [found.state[name] for name in names if found.state.get(name)]
        if all("step" in state for state in states):
            rest = {key: value for key, value in values.items() if key != "step"}
            found.groups[number] = names, rest
        elif "step" in values:
            for state in states:
                state.setdefault("step", _steps(values["step"]))


def _universal(folder: Path, main: Mapping[str, Any], found: Found) -> None:
    """Read one folder per parameter, and one file per tensor."""
    common = _load(folder / "optimizer_state.pt")
    found.groups = _groups(common["param_groups"], main["param_shapes"])
    found.scale = common.get("loss_scaler")
    for number, shapes in enumerate(main["param_shapes"]):
        flat = common.get("optimizer_state_dict", {"state": {}})["state"].get(number, {})
        for name, shape in shapes.items():
            state = found.state.setdefault(name, {})
            for file in sorted((folder / name).glob("*.pt")):
                if file.stem == "step":
                    state["step"] = _steps(_of_file(file, ()))
                    continue
                # It is read again later: there may be more of them than a process can have mapped at once.
                dtype = str(_of_file(file, shape).dtype).removeprefix("torch.")
                outline = Outline("like_param", tuple(shape), dtype)
                state[file.stem] = Source(outline, partial(_of_file, file, shape))
            if "step" in flat:
                state.setdefault("step", _steps(flat["step"]))
            found.weights[name] = state.pop("fp32")


def _of_file(file: Path, shape: Sequence[int]) -> Tensor:
    loaded: Any = _load(file)
    return torch.as_tensor(loaded["param"] if isinstance(loaded, dict) else loaded).view(tuple(shape))


def _steps(count: Any) -> Source:
    return Source.of(torch.as_tensor(count, dtype=torch.float32).view(()))


def _stage_0(saved: Mapping[str, Any], contents: Contents, unit: str, found: Found) -> None:
    """Without ZeRO parameters have numbers only: the order is the run's."""
    inner = saved.get("optimizer_state_dict", saved)
    here = [group["params"] for group in contents.state["units"][unit]["optimizers"][0]["groups"]]
    shapes = {name: contents.tensors[unit, f"model/{name}"].shape for name in chain(*here)}
    flats: Sequence[Tensor] = saved.get("fp32_groups_flat", ())
    masters = list(chain(*saved.get("fp32_groups", ())))
    listed = (
        [{name: shapes[name] for name in names} for names in here]
        if flats
        else [{n: s} for n, s in shapes.items()]
    )
    if len(listed) != sum(len(group["params"]) for group in inner["param_groups"]):
        raise CheckpointError(
            f"its optimizer has {sum(len(g['params']) for g in inner['param_groups'])} parameters, this run"
            f" {len(listed)}\nmake the optimizer's groups as they were when it was saved"
        )
    for number, of_one in enumerate(listed):
        cuts = _even(of_one, 1)
        for what, value in inner["state"].get(number, {}).items():
            pieces = _pieces(value.view(-1) if isinstance(value, Tensor) and value.ndim else value, cuts)
            for name, source in _of_all([pieces], of_one, value).items():
                found.state.setdefault(name, {})[what] = source
        if flats or masters:
            flat = (flats or masters)[number].view(-1)
            found.weights |= _joined([_pieces(flat, cuts)], of_one)
    found.groups = _groups(inner["param_groups"], listed)
    found.scale = saved


# -- the rest ------------------------------------------------------------------------------------


def _with_frozen(groups: Sequence[Group], here: Sequence[Mapping[str, Any]]) -> Iterator[Group]:
    """DeepSpeed forgets which group a frozen parameter is in; it has no state either."""
    known = {name for names, _ in groups for name in names}
    for number, (names, values) in enumerate(groups):
        mine = here[number]["params"] if len(groups) == len(here) else ()
        yield [*names, *(name for name in mine if name not in known)], values


def _own_entries(contents: Contents, unit: str, main: Mapping[str, Any], scale: Any) -> None:
    """State of a run under DeepSpeed: counters, and a loss scale that moves.

    A fixed one, and the 1 of other precisions, are the config's.
    """
    fields = vars(scale) if isinstance(scale, Fields) else scale or {}
    if not (fields.get("dynamic") or fields.get("dynamic_loss_scale")):
        fields = {}
    for own in contents.ranks:
        for entries in own["plugins"].get(unit, {}).get("replicated", {}).values():
            for name, source, keys in (("counters", main, _COUNTERS), ("loss_scale", fields, _SCALE)):
                there = entries.get(name, {})
                there.update({key: source[key] for key in keys if key in there and key in source})


def _left_out(main: Mapping[str, Any], described: dict[str, Any]) -> Iterator[str]:
    schedulers = described["schedulers"]
    if main.get("lr_scheduler") and len(schedulers) == 1:
        schedulers[0]["state"] = main["lr_scheduler"]
    elif schedulers:
        yield "the scheduler: it is not in there"
    own = {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"}
    own |= {
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
    }
    own |= {"dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"}
    own |= {*_COUNTERS, "universal_checkpoint_info", "has_universal_checkpoint_info"}
    if more := sorted(main.keys() - own):
        yield f"what the script gave save_checkpoint as client_state: {', '.join(more)}"
