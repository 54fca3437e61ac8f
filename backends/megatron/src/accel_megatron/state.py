"""State hooks.

Weights and moments on this rank by the names of the user's own model, as boxes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core import (
    AccelError,
    Entry,
    JointState,
    Leaf,
    OptimizerState,
    RandomStream,
    full_leaf,
    hooks,
    implements,
    refuse_own_state,
    unplaceable_state,
)
from accel_megatron.building import first_ranks
from accel_megatron.shard_map import boxes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Run, TensorTemplate, Unit
    from accel_megatron.engine import Engine
    from accel_megatron.shard_map import Piece
    from accel_megatron.stepped import Stepped
    from accel_megatron.stepping import Stepper

__all__ = ["MegatronState"]

logger = logging.getLogger(__name__)

Template = Mapping[str, Mapping[str, "TensorTemplate"]]
Scalars = dict[tuple[Tensor, str], dict[str, Tensor]]
"""(stepped tensor, key) -> canonical name -> a number that is loaded for it."""
_STREAM = "megatron:"


class MegatronState:
    """Each rank's part of the state, as views of the tensors that megatron-core steps.

    Nothing is gathered.
    """

    below: Any
    run: Run

    def __init__(self) -> None:
        self.engines: dict[Unit, Engine] = {}
        self.steppers: dict[Unit, Stepper] = {}
        self._loading: dict[Unit, Scalars] = {}
        self._asked: dict[Unit, dict[str, TensorTemplate]] = {}

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        """Leaves of weights; of a stepped parameter its master, in boxes."""
        engine, stepper = self.engines[unit], self.steppers.get(unit)
        held: dict[str, list[Any]] = {}
        stepped = {} if stepper is None else {each.parameter: each for each in stepper.stepped()}
        for parameter, pieces in engine.chunks.shard_map.items():
            each = stepped.get(parameter)
            if each is None and stepper is not None and parameter.requires_grad:
                continue  # other ranks step all of it
            elements = parameter.detach().view(-1) if each is None else each.elements
            _add(held, unit, pieces, elements, 0 if each is None else each.begin, parameter)
        shapes = {name: tuple(each.shape) for name, each in unit.named_parameters().items()}
        leaves: dict[str, Leaf] = {
            name: leaf for name, leaf in self.below.model_state(unit).items() if name not in shapes
        }
        return leaves | {name: _leaf(shape, held.get(name, ())) for name, shape in shapes.items()}

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        """Return megatron-core's state by the parameters of the user's model."""
        refuse_own_state(optimizer)
        loading = self._loading.get(unit, {})
        shapes = {name: tuple(each.shape) for name, each in unit.named_parameters().items()}
        held: dict[str, dict[str, list[Any]]] = {}
        leaves: dict[str, Leaf] = {}
        for each in self.steppers[unit].stepped():
            pieces = self.engines[unit].chunks.shard_map[each.parameter]
            # Optimizers of transformer-engine and apex keep the step in the group.
            numbers = {"step": each.group["step"]} if each.counts_by_group and "step" in each.group else {}
            for key, value in [*each.state.items(), *numbers.items()]:
                if _is_number(value, each):
                    waiting = loading.get((each.key, key), {})
                    leaves |= {
                        f"{name}/{key}": full_leaf(waiting.get(name, _number(value)), kind="scalar")
                        for name in _names(unit, pieces)
                    }
                else:
                    _add(held.setdefault(key, {}), unit, pieces, value.view(-1), each.begin, each.parameter)
        for key, by_name in held.items():
            leaves |= {f"{name}/{key}": _leaf(shapes[name], boxes) for name, boxes in by_name.items()}
        for path, tensor in self._asked.get(unit, {}).items():  # of a load: other ranks have the rest
            empty = Leaf(kind=tensor.kind, global_shape=tensor.global_shape, shards=(), replicated=True)
            leaves.setdefault(path, empty)
        below: OptimizerState = self.below.optimizer_state(unit, optimizer)
        return OptimizerState(leaves=leaves, groups=below.groups)

    @implements(hooks.refuse_optimizer_state)
    def refuse_optimizer_state(
        self, unit: Unit, optimizer: Optimizer, template: Template, plain: Mapping[str, Mapping[str, Any]]
    ) -> Sequence[str]:
        """Reasons: state megatron-core cannot hold, or that differs in one tensor."""
        odd = unplaceable_state(template, plain)
        place = f"megatron-core's optimizer has no place for {', '.join(odd[:10])}; resume with its strategy"
        by_group: dict[int, list[str]] = {}
        found = [place] if odd else []
        for stepped in self.steppers[unit].stepped():
            names = self._names_of(unit, stepped)
            found.append(JointState.of(names, template).disagreement() or "")
            if stepped.counts_by_group:
                by_group.setdefault(id(stepped.group), []).extend(names)
        of_groups = [JointState.of(names, template) for names in by_group.values()]
        found += [joint.disagreement(keys=("step",)) or "" for joint in of_groups]
        return list(dict.fromkeys(filter(None, found)))

    def _names_of(self, unit: Unit, stepped: Stepped) -> list[str]:
        return _names(unit, self.engines[unit].chunks.shard_map[stepped.parameter])

    @implements(hooks.materialize_optimizer_state)
    def materialize_optimizer_state(
        self, unit: Unit, optimizer: Optimizer, template: Template, plain: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Numbers wait for `load_state`.

        What is new in a tensor has no moments, and the tensor's step.
        """
        loading = self._loading.setdefault(unit, {})
        loading.clear()
        self._asked[unit] = {
            f"{name}/{key}": tensor for name, tensors in template.items() for key, tensor in tensors.items()
        }
        new: list[str] = []
        for stepped in self.steppers[unit].stepped():
            state = stepped.optimizer.state[stepped.key]
            joint = JointState.of(self._names_of(unit, stepped), template)
            new += joint.new
            # State that the checkpoint lacks was this run's own.
            for key in [key for key in state if key not in joint.wanted]:
                del state[key]
            for key, tensor in joint.wanted.items():
                if tensor.kind == "scalar":
                    loading[stepped.key, key] = {name: torch.zeros(()) for name in joint.known}
                    (stepped.group if stepped.counts_by_group and key == "step" else state).setdefault(key, 0)
                elif joint.new or getattr(state.get(key), "shape", None) != stepped.key.shape:
                    state[key] = torch.zeros_like(stepped.key.detach(), dtype=getattr(torch, tensor.dtype))
        kept = {name: each for name, each in unit.named_parameters().items() if name in template}
        if frozen := [name for name, each in kept.items() if not each.requires_grad]:
            logger.warning(
                "megatron: the checkpoint has optimizer state of %s, frozen here; megatron-core keeps none of"
                " what it does not step, so this is left out, and the next checkpoint lacks it",
                ", ".join(frozen[:10]) + (", ..." if len(frozen) > 10 else ""),
            )
        if new:
            logger.warning(
                "megatron: the checkpoint has no optimizer state of %s; what they are stepped together with"
                " has, so their moments begin at zero, and their step is that of the others",
                ", ".join(dict.fromkeys(new)),
            )

    def refresh(self, unit: Unit) -> None:
        """Let forward compute with the loaded weights. Collective."""
        self._asked.pop(unit, None)
        loading = self._loading.pop(unit, {})
        stepped = {each.key: each for each in self.steppers[unit].stepped()} if loading else {}
        for (key, name), values in loading.items():
            value = next(iter(values.values())).item()  # they agree, or they would have been refused
            if stepped[key].counts_by_group and name == "step":
                _set_step(stepped[key].group, value)
            else:
                stepped[key].state[name] = torch.tensor(value)
        if unit in self.steppers:
            self.steppers[unit].refresh()

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        """Return the loss scale, if there is one."""
        scaler = self._scaler(unit)
        return {} if scaler is None else {"loss_scale": Entry(value=_plain(scaler.state_dict()))}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        self.refresh(unit)
        scaler = self._scaler(unit)
        if scaler is not None and "loss_scale" in entries:
            state: Any = entries["loss_scale"].value
            like = scaler.state_dict()
            scaler.load_state_dict(
                {
                    key: torch.tensor(value, dtype=like[key].dtype)
                    if isinstance(like.get(key), Tensor)
                    else value
                    for key, value in state.items()
                }
            )

    def _scaler(self, unit: Unit) -> Any:
        each = self.steppers[unit].inner_optimizers() if unit in self.steppers else ()
        return getattr(each[0], "grad_scaler", None) if each else None

    @implements(hooks.random_streams)
    def random_streams(self) -> Mapping[str, RandomStream]:
        """megatron-core's own streams, by which ranks that split a layer draw differently."""
        if not self.engines:
            return {}
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        tracker = get_cuda_rng_tracker()

        def stream(name: str) -> RandomStream:
            return RandomStream(
                lambda: tracker.get_states()[name].cpu(),  # noqa: PLW0108  of the state then
                lambda state: tracker.set_states({**tracker.get_states(), name: state}),
            )

        return {f"{_STREAM}{name}": stream(name) for name in tracker.get_states()}

    @implements(hooks.full_parameters)
    def full_parameters(
        self, unit: Unit, names: Sequence[str], writeback: bool
    ) -> AbstractContextManager[Any]:
        raise AccelError(
            f"unit {unit.name!r} is in megatron-core's form: no rank has modules with whole weights\n"
            "read whole weights one by one: accelerator.iter_weights(model)"
        )

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        computed = self.engines[unit].chunks.config.params_dtype
        parameters = unit.named_parameters()
        for name, leaf in self.model_state(unit).items():
            if name in parameters:
                own = parameters[name].dtype
                tensor = self._put_together(leaf, dtype or computed if own.is_floating_point else own)
            else:  # a buffer, which forward may have changed on each rank
                tensor = first_ranks(leaf.shards[0][1], self.run)
            yield name, tensor.to(to or self.run.device, dtype if tensor.is_floating_point() else None)

    def _put_together(self, leaf: Leaf, dtype: torch.dtype) -> Tensor:
        tensor = torch.zeros(leaf.global_shape, dtype=dtype, device=self.run.device)
        for offset, view in leaf.shards:
            tensor[tuple(slice(at, at + size) for at, size in zip(offset, view.shape, strict=True))] = view
        # Each byte comes from one rank, or is the same on several: the largest is the right one.
        self.run.collectives("world").all_reduce(tensor.view(-1).view(torch.uint8), "max")
        return tensor


def _names(unit: Unit, pieces: Sequence[Piece]) -> list[str]:
    return list(dict.fromkeys(unit.aliases.get(piece.name, piece.name) for piece in pieces))


def _add(
    held: dict[str, list[Any]],
    unit: Unit,
    pieces: Sequence[Piece],
    elements: Tensor,
    begin: int,
    parameter: nn.Parameter,
) -> None:
    for piece in pieces:
        name = unit.aliases.get(piece.name, piece.name)
        held.setdefault(name, []).extend(boxes(piece, elements, begin, parameter.shape))


def _leaf(shape: tuple[int, ...], shards: Sequence[Any]) -> Leaf:
    # A tied weight is on the first and the last stage; on one rank it may be in two chunks.
    return Leaf(kind="like_param", global_shape=shape, shards=tuple(shards), replicated=True)


def _is_number(value: Any, each: Stepped) -> bool:
    return not isinstance(value, Tensor) or (value.ndim == 0 and each.key.ndim > 0)


def _number(value: Any) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))


def _set_step(group: dict[str, Any], value: float) -> None:
    """Set a step, as the optimizer keeps it: a tensor if capturable, else a number."""
    if isinstance(group.get("step"), Tensor):
        group["step"].fill_(int(value))
    else:
        group["step"] = int(value)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in state.items()}
