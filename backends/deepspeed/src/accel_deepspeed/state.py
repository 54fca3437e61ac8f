"""State hooks.

Weights, moments and scales of an engine by the names of the user's own model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from accel_core import (
    CheckpointError,
    Entry,
    JointState,
    Leaf,
    OptimizerState,
    full_leaf,
    hooks,
    implements,
    refuse_own_state,
    unplaceable_state,
)
from accel_deepspeed.experts import elsewhere
from accel_deepspeed.optimizer_shards import Fragment, fragments, live_part, nowhere, unstepped
from accel_deepspeed.weights import gathered, keep_available, whole_weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from accel_core import TensorTemplate, Unit

__all__ = ["EngineState"]

_COUNTERS: Final = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALE: Final = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OWN: Final = ("params", "param_names", "moe", "name")
"""Entries of a param_group that are not hyperparameters."""
_ADAM: Final = ("FusedAdam", "DeepSpeedCPUAdam")
"""DeepSpeed's own Adam classes, whose `adam_w_mode` is true for AdamW."""

logger = logging.getLogger(__name__)

Template = Mapping[str, Mapping[str, "TensorTemplate"]]
Scalars = dict[str, Tensor]
"""`NAME/KEY` -> number that DeepSpeed keeps once per flat tensor (the step)."""


class EngineState:
    """Each rank's part of the state, as views of the tensors that DeepSpeed steps.

    Nothing is gathered.
    """

    below: Any

    def __init__(self) -> None:
        self._loading: dict[Unit, Scalars] = {}
        self._groups: dict[Unit, list[list[str]]] = {}
        self._left_out: dict[Unit, dict[str, Leaf]] = {}
        """`NAME/KEY` of frozen parameters -> empty leaf, during a load.

        The checkpoint has such state.
        """

    def remember_groups(self, unit: Unit, groups: Sequence[Sequence[Any]]) -> None:
        """Note each group's parameters before the engine is made: it forgets frozen ones."""
        names = {parameter: name for name, parameter in unit.named_parameters().items()}
        self._groups[unit] = [[names[parameter] for parameter in group] for group in groups]

    def forget(self, unit: Unit) -> None:
        """Forget a unit that was released."""
        for held in (self._groups, self._left_out):
            held.pop(unit, None)

    @implements(hooks.model_state)
    def model_state(self, unit: Unit) -> Mapping[str, Leaf]:
        """Leaves of weights; of a stepped parameter its master, in boxes."""
        leaves: dict[str, Leaf] = dict(self.below.model_state(unit))
        leaves |= {name: unstepped(parameter) for name, parameter in unit.named_parameters().items()}
        leaves |= {fragment.name: fragment.of(fragment.flat) for fragment in fragments(unit)}
        others = {name: nowhere(parameter) for name, parameter in elsewhere(unit).items()}
        return dict(sorted({**leaves, **others}.items())) if others else leaves

    @implements(hooks.optimizer_state)
    def optimizer_state(self, unit: Unit, optimizer: Optimizer) -> OptimizerState:
        """State by parameter, from DeepSpeed's flat tensors, in torch's words."""
        base, scalars = _base(unit), self._loading.get(unit, {})
        with _groups_filled(unit, base):
            refuse_own_state(base)
        names: list[list[str]] = [[] for _ in base.param_groups]
        leaves: dict[str, Leaf] = dict(self._left_out.get(unit, {}))
        for fragment in fragments(unit):
            names[fragment.group].append(fragment.name)
            for key, value in base.state.get(fragment.flat, {}).items():
                path = f"{fragment.name}/{key}"
                leaves[path] = _leaf(fragment, key, scalars.get(path, value))
        listed = self._groups.get(unit, [])
        if len(listed) == len(names):
            names = listed
        groups = [
            {**_hyperparameters(base, group), "params": of_group}
            for group, of_group in zip(base.param_groups, names, strict=True)
        ]
        return OptimizerState(leaves=leaves, groups=groups, algorithm=_algorithm(base))

    @implements(hooks.refuse_optimizer_state)
    def refuse_optimizer_state(
        self,
        unit: Unit,
        optimizer: Optimizer,
        template: Template,
        plain: Mapping[str, Mapping[str, Any]],
    ) -> Sequence[str]:
        """Reasons: state that flat tensors cannot hold, or that differs inside one."""
        reasons = [*_foreign(_base(unit), template, plain)]
        for _, parts in _by_flat(unit):
            if disagreement := JointState.of([part.name for part in parts], template).disagreement():
                reasons.append(f"{disagreement} by DeepSpeed; give each a param_group of its own")
        return reasons

    @implements(hooks.materialize_optimizer_state)
    def materialize_optimizer_state(
        self,
        unit: Unit,
        optimizer: Optimizer,
        template: Template,
        plain: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Allocate flat tensors, with zeros in DeepSpeed's padding and for new parameters.

        Numbers wait for `load_state`.
        """
        (engine,) = unit.wrapped
        base, scalars = _base(unit), self._loading.setdefault(unit, {})
        scalars.clear()
        self._leave_out(unit, template)
        new: list[str] = []
        for flat, parts in _by_flat(unit):
            had, joint = base.state.pop(flat, {}), JointState.of([part.name for part in parts], template)
            new += joint.new
            for key, tensor in joint.wanted.items():
                if tensor.kind == "scalar":
                    base.state[flat][key] = 0
                    scalars.update({f"{name}/{key}": torch.zeros(()) for name in joint.known})
                    continue
                dtype = getattr(torch, tensor.dtype)
                fits = key in had and had[key].dtype == dtype
                base.state[flat][key] = had[key] if fits else torch.zeros_like(flat.detach(), dtype=dtype)
                for part in parts:
                    if part.name in joint.new:
                        part.cut(base.state[flat][key]).zero_()
        if new:
            logger.warning(
                "deepspeed: the checkpoint has no optimizer state of %s; DeepSpeed steps parameters together,"
                " so their moments begin at zero, and their step is that of their group",
                ", ".join(new[:10]) + (", ..." if len(new) > 10 else ""),
            )
        if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
            engine.optimizer._hp_optimizer_states_linked = (
                False  # its views are of the tensors before the load
            )

    def _leave_out(self, unit: Unit, template: Template) -> None:
        """Leave out the state of parameters that were frozen since.

        ZeRO holds no state of them.
        """
        stepped = {part.name for part in fragments(unit)}
        frozen = [name for name in template if name not in stepped]
        self._left_out[unit] = {
            f"{name}/{key}": Leaf(kind=each.kind, global_shape=each.global_shape, shards=(), replicated=True)
            for name in frozen
            for key, each in template[name].items()
        }
        if frozen:
            logger.warning(
                "deepspeed: the checkpoint has optimizer state of %s, frozen here; ZeRO keeps none of what it"
                " does not step, so this is left out, and the next checkpoint lacks it",
                ", ".join(frozen[:10]) + (", ..." if len(frozen) > 10 else ""),
            )

    def _take_over(self, unit: Unit) -> None:
        """Make forward's weights from the masters. Collective."""
        self._left_out.pop(unit, None)
        base, scalars = _base(unit), self._loading.pop(unit, {})
        for flat, parts in _by_flat(unit):
            for key in base.state.get(flat, {}):
                paths = [path for part in parts if (path := f"{part.name}/{key}") in scalars]
                if paths:  # they agree, or they would have been refused
                    base.state[flat][key] = _number(base, parts[0], scalars[paths[0]].item())
        _refresh(unit)

    @implements(hooks.save_state)
    def save_state(self, unit: Unit) -> Mapping[str, Entry]:
        """Return the engine's counters, and its loss scale if that moves."""
        homes = _homes(unit)
        found = {name: _values(home, keys) for name, (home, keys) in homes.items()}
        return {name: Entry(value=values) for name, values in found.items() if values}

    @implements(hooks.load_state)
    def load_state(self, unit: Unit, entries: Mapping[str, Entry]) -> None:
        """Load counters, and the loss scale if it moves here (fp16)."""
        self._take_over(unit)
        for name, (home, keys) in _homes(unit).items():
            values: Any = entries[name].value if name in entries else {}
            for key in _values(home, keys).keys() & values.keys():
                setattr(home, key, values[key])

    @implements(hooks.full_parameters)
    def full_parameters(
        self, unit: Unit, names: Sequence[str], writeback: bool
    ) -> AbstractContextManager[Any]:
        return gathered(unit, set(names), writeback=writeback)

    @implements(hooks.iter_weights)
    def iter_weights(
        self, unit: Unit, dtype: torch.dtype | None, to: torch.device | None
    ) -> Iterator[tuple[str, Tensor]]:
        return whole_weights(unit, self.model_state(unit), dtype, to)


def _base(unit: Unit) -> Any:
    """Return the optimizer that steps the flat tensors."""
    (engine,) = unit.wrapped
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


@contextmanager
def _groups_filled(unit: Unit, base: Any) -> Iterator[None]:
    """Fill groups without parameters, on whose state `state_dict` fails.

    Stage 3 leaves such groups between steps.
    """
    empty = {n: group for n, group in enumerate(base.param_groups) if not group["params"]}
    for flat, parts in _by_flat(unit):
        if parts[0].group in empty:
            empty[parts[0].group]["params"].append(flat)
    try:
        yield
    finally:
        for group in empty.values():
            group["params"].clear()


def _by_flat(unit: Unit) -> Iterator[tuple[Tensor, list[Fragment]]]:
    for _, parts in groupby(fragments(unit), key=lambda each: id(each.flat)):
        listed = list(parts)
        yield listed[0].flat, listed


def _leaf(part: Fragment, key: str, value: Any) -> Leaf:
    if key == "step" or not isinstance(value, Tensor) or (value.ndim == 0 and part.flat.ndim):
        return full_leaf(torch.as_tensor(value, dtype=torch.float32), kind="scalar")
    if value.shape != part.flat.shape:
        raise CheckpointError(
            f"deepspeed: {key}, of shape {list(value.shape)}, is state of several parameters together,"
            f" {part.name} among them\nuse an optimizer that keeps state element by element, such as AdamW"
        )
    return part.of(value)


def _algorithm(base: Any) -> str:
    name = type(base).__name__
    if name not in _ADAM or not all(group["bias_correction"] for group in base.param_groups):
        return name
    return "AdamW" if base.adam_w_mode else "Adam"


def _hyperparameters(base: Any, group: dict[str, Any]) -> dict[str, Any]:
    if _algorithm(base) == type(base).__name__:
        return {key: group[key] for key in group if key not in _OWN}
    for key, value in (("amsgrad", False), ("maximize", False)):
        group.setdefault(key, value)  # loads write to these keys, and they are checked before the next step
    group.setdefault("decoupled_weight_decay", _algorithm(base) == "AdamW")
    return {key: group[key] for key in group if key not in (*_OWN, "bias_correction", "step")}


def _foreign(base: Any, template: Template, plain: Mapping[str, Any]) -> Iterator[str]:
    odd = unplaceable_state(template, plain)
    if type(base).__name__ in _ADAM:
        flags = [key for key in ("amsgrad", "maximize") if any(group.get(key) for group in base.param_groups)]
        odd += [f"{key}=True" for key in flags]
    if odd:
        yield (
            f"{type(base).__name__} over flat tensors has no place for {', '.join(odd[:10])};"
            " resume with the optimizer that saved it"
        )


def _number(base: Any, part: Fragment, value: float) -> Tensor | int:
    if type(base).__module__.startswith("deepspeed."):
        return int(value)
    group = base.param_groups[part.group]
    on_device = group.get("capturable") or group.get("fused")
    return torch.tensor(value, device=part.flat.device if on_device else "cpu")


def _refresh(unit: Unit) -> None:
    (engine,) = unit.wrapped
    optimizer: Any = engine.optimizer
    name = type(optimizer).__name__
    for parameter in unit.named_parameters().values():  # with hpZ a node keeps copies of frozen weights
        if hasattr(parameter, "ds_secondary_tensor"):
            parameter.ds_secondary_tensor = None
    if name == "DeepSpeedZeroOptimizer_Stage3":
        optimizer.checkpoint_event_prologue()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_epilogue()
    elif name == "DeepSpeedZeRoOffload":
        optimizer.partition_all_parameters()
        keep_available(optimizer)
    else:
        for fragment in fragments(unit):
            live_part(fragment).copy_(fragment.cut(fragment.flat))
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()


def _homes(unit: Unit) -> dict[str, tuple[Any, Sequence[str]]]:
    """Objects whose values are saved.

    The loss scale is state only if it is dynamic: a fixed scale is in the config.
    """
    (engine,) = unit.wrapped
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    moving = scaler if getattr(scaler, "dynamic", False) else None
    return {"counters": (engine, _COUNTERS), "loss_scale": (moving, _SCALE)}


def _values(home: Any, keys: Sequence[str]) -> dict[str, Any]:
    return {key: getattr(home, key) for key in keys if hasattr(home, key)}
