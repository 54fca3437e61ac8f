"""State hooks: weights and moments on this rank by the names of the user's own model, as boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_core import AccelError, CheckpointError, Entry, Leaf, OptimizerState, hooks, implements, whole
from accel_megatron.building import first_ranks
from accel_megatron.pieces import boxes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from accel_core import Run, TensorTemplate, Unit
    from accel_megatron.engine import Engine
    from accel_megatron.pieces import Piece
    from accel_megatron.stepping import Stepped, Stepper

__all__ = ["MegatronState"]

Scalars = dict[tuple[Tensor, str], dict[str, Tensor]]
"""(what is stepped, key) -> canonical name -> a number that is loaded for it."""
_STREAM = "megatron:"


class MegatronState:
    """Each rank's part of the state, as views of what megatron-core steps. Nothing is gathered."""

    below: Any
    run: Run

    def __init__(self) -> None:
        self.engines: dict[Unit, Engine] = {}
        self.steppers: dict[Unit, Stepper] = {}
        self._loading: dict[Unit, Scalars] = {}
        self._asked: dict[Unit, dict[str, TensorTemplate]] = {}

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        """Of a stepped parameter the master, in as many boxes as this rank's part of it needs."""
        engine, stepper = self.engines[unit], self.steppers.get(unit)
        held: dict[str, list[Any]] = {}
        stepped = {} if stepper is None else {each.parameter: each for each in stepper.stepped()}
        for parameter, pieces in engine.chunks.pieces.items():
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
        """By parameter of the user's model what is kept by tensor of megatron-core's."""
        loading = self._loading.get(unit, {})
        shapes = {name: tuple(each.shape) for name, each in unit.named_parameters().items()}
        held: dict[str, dict[str, list[Any]]] = {}
        leaves: dict[str, Leaf] = {}
        for each in self.steppers[unit].stepped():
            pieces = self.engines[unit].chunks.pieces[each.parameter]
            for key, value in each.state.items():
                if _is_number(value, each):
                    waiting = loading.get((each.key, key), {})
                    leaves |= {
                        f"{name}/{key}": whole(waiting.get(name, _number(value)), kind="scalar")
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

    @implements(hooks.materialize_optimizer_state)
    def materialize_optimizer_state(
        self,
        unit: Unit,
        optimizer: Optimizer,
        template: Mapping[str, Mapping[str, TensorTemplate]],
        plain: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Numbers wait for `state_loaded`, to be compared: several weights may be stepped as one."""
        loading = self._loading.setdefault(unit, {})
        loading.clear()
        self._asked[unit] = {
            f"{name}/{key}": tensor for name, tensors in template.items() for key, tensor in tensors.items()
        }
        if any(plain.values()):
            raise CheckpointError(
                f"megatron: there is no place for {next(n for n, v in plain.items() if v)}'s state"
            )
        for each in self.steppers[unit].stepped():
            names = _names(unit, self.engines[unit].chunks.pieces[each.parameter])
            wanted = _agreed({name: template.get(name, {}) for name in names})
            state = each.optimizer.state[each.key]
            for key in [key for key in state if key not in wanted]:
                del state[key]
            for key, tensor in wanted.items():
                if tensor.kind == "scalar":
                    loading[each.key, key] = {name: torch.zeros(()) for name in names}
                    state.setdefault(key, torch.zeros(()))
                elif tensor.kind != "like_param":
                    raise CheckpointError(
                        f"megatron: {key} of {names[0]} is {tensor.kind}, which is not kept here\n"
                        "resume with the optimizer that saved it"
                    )
                elif getattr(state.get(key), "shape", None) != each.key.shape:
                    state[key] = torch.zeros_like(each.key.detach(), dtype=getattr(torch, tensor.dtype))

    @implements(hooks.state_loaded)
    def state_loaded(self, unit: Unit) -> None:
        """Collective: forward computes with what was loaded."""
        self._asked.pop(unit, None)
        for (key, name), values in self._loading.pop(unit, {}).items():
            (optimizer,) = [each.optimizer for each in self.steppers[unit].stepped() if each.key is key]
            found = {float(value) for value in values.values()}
            if len(found) > 1:
                raise CheckpointError(
                    f"megatron: {name} differs between {', '.join(values)}, which are stepped as one\n"
                    "load with strict=False and without optimizer state"
                )
            optimizer.state[key][name] = torch.tensor(found.pop())
        if unit in self.steppers:
            self.steppers[unit].refresh()

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        """The loss scale, where there is one."""
        scaler = self._scaler(unit)
        return {} if scaler is None else {"loss_scale": Entry(value=_plain(scaler.state_dict()))}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
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
        each = self.steppers[unit].each() if unit in self.steppers else ()
        return getattr(each[0], "grad_scaler", None) if each else None

    @implements(hooks.rng_state)
    def rng_state(self) -> Mapping[str, Tensor]:
        """megatron-core's own streams: what ranks that split a layer draw apart."""
        if not self.engines:
            return {}
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        return {
            f"{_STREAM}{name}": state.cpu() for name, state in get_cuda_rng_tracker().get_states().items()
        }

    @implements(hooks.set_rng_state)
    def set_rng_state(self, streams: Mapping[str, Tensor]) -> None:
        mine = {
            name.removeprefix(_STREAM): each for name, each in streams.items() if name.startswith(_STREAM)
        }
        if mine and self.engines:
            from megatron.core.tensor_parallel import get_cuda_rng_tracker

            get_cuda_rng_tracker().set_states(mine)

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


def _agreed(wanted: Mapping[str, Mapping[str, TensorTemplate]]) -> Mapping[str, TensorTemplate]:
    (first, keys), *others = wanted.items()
    for name, other in others:
        if {k: (t.kind, t.dtype) for k, t in other.items()} != {
            k: (t.kind, t.dtype) for k, t in keys.items()
        }:
            raise CheckpointError(
                f"megatron: {first} has the state {sorted(keys) or 'of no step'}, {name}"
                f" {sorted(other) or 'of no step'}, and they are stepped as one tensor\n"
                "load with strict=False and without optimizer state"
            )
    return keys


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in state.items()}
