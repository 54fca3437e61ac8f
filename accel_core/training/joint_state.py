"""Optimizer state of parameters that an engine steps together, as one flat or fused tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from attrs import frozen

from accel_core.contract.state import Json, TensorTemplate

Template = Mapping[str, Mapping[str, TensorTemplate]]


@frozen
class JointState:
    """The state that a checkpoint has of parameters that are stepped together.

    Attributes:
        known: parameter -> key -> template, for the parameters that have state in the checkpoint.
        new: the other parameters, if there are known ones: their moments begin at zero.
    """

    known: Template
    new: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], template: Template) -> JointState:
        """Find the state of the named parameters in the template of a load."""
        known = {name: wanted for name in names if (wanted := template.get(name))}
        return cls(known, tuple(dict.fromkeys(name for name in names if known and name not in known)))

    @property
    def wanted(self) -> Mapping[str, TensorTemplate]:
        """The state to allocate for the tensor that is stepped: key -> template."""
        return next(iter(self.known.values()), {})

    def disagreement(self, *, keys: Iterable[str] | None = None) -> str | None:
        """Return a sentence about two parameters with different state or numbers; None if all agree.

        One tensor has one set of moments and one step, so such a state can be loaded only by an engine that
        steps the parameters apart.

        Args:
            keys: compare only the numbers with these keys, such as the step that a group has.
        """
        for (first, one), (name, other) in pairwise(self.known.items()):
            if keys is None and {k: t.dtype for k, t in one.items()} != {
                k: t.dtype for k, t in other.items()
            }:
                return f"{first} has {sorted(one)}, {name} {sorted(other)}, and they are stepped as one"
            for key in one.keys() & other.keys() & set(one if keys is None else keys):
                if one[key].kind == "scalar" and (a := one[key].number()) != (b := other[key].number()):
                    return f"{key} of {first} is {a:g}, of {name} {b:g}, and they are stepped as one"
        return None


def unplaceable_state(template: Template, plain: Mapping[str, Mapping[str, Json]]) -> list[str]:
    """Return `NAME/KEY` of state that has no place in a tensor of several parameters.

    Such a tensor takes state of the parameters' shape, and numbers. Factored moments and values that are not
    tensors belong to one parameter.
    """
    odd = [f"{name}/{key}" for name, values in plain.items() for key in values]
    return odd + [
        f"{name}/{key}"
        for name, tensors in template.items()
        for key, tensor in tensors.items()
        if tensor.kind not in ("like_param", "scalar")
    ]
