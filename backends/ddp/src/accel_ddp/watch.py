"""Checks that gradients come from all ranks; torch's wrapper does not check it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.nn import parallel

from accel_core import AccelError, ConfigError, before_step

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from accel_core import Run, Unit

__all__ = ["CARRIED", "COPIES", "RUNS", "DistributedDataParallel", "follow", "refuse_hooks"]

_READY: Final = "ready"
_CONVERTED: Final = "converted"
_BY_HAND: Final = "by hand"
RUNS: Final[WeakKeyDictionary[nn.Module, Callable[[], Run | None]]] = WeakKeyDictionary()
"""Model -> weak reference to its run. Not in the model, which may be copied."""
COPIES: Final[WeakSet[nn.Module]] = WeakSet()
"""Deep copies and unpickled models, each with a reducer of its own."""
_REASONS: Final = {
    "none": "was called on the model inside, or on a part of it: only the forward of the model that"
    " prepare returned has its gradients reduced",
    "used": "is the second of one forward (retain_graph), or of two forwards in a row, or was called on a"
    " part of the model: only the first backward after a forward is reduced",
    "quiet": "is not reduced, as its forward ran inside no_sync"
    " (accelerator.sync_gradients = True stands before the forward)",
    _CONVERTED: "came after its weights were converted to another dtype or device: only the gradients of"
    " those that prepare saw are reduced",
    _BY_HAND: "never ran: gradients were assigned, as from torch.autograd.grad, and are this rank's alone",
}
_REMEDIES: Final = {
    "quiet": "run the last forward and backward before a step outside no_sync; a step by gradients that you"
    " reduce yourself stands inside it",
    _CONVERTED: "convert the model before prepare, or call accelerator.free_memory() and prepare it again",
    _BY_HAND: "call accelerator.backward; or reduce them yourself, and run the forward inside"
    " accelerator.no_sync(model)",
}
_IGNORED: Final = "_ddp_params_and_buffers_to_ignore"
"""Attribute in which torch's wrapper looks for parameters to leave alone."""
CARRIED: Final = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    }
)
"""The dtypes that every process group carries."""


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's wrapper, under its name, which notes whether each backward reduces.

    `awaited` says of each parameter that is asked whether its next gradient would be reduced, and else why
    not; `last` what it was at the last one of any, or of converted weights. `before` are their gradients at
    the last forward, and `open` whether no backward of it was reduced yet. `late` holds the parameters that
    were frozen here and got a gradient since the last step.
    """

    asked: list[nn.Parameter]
    awaited: list[str]
    last: str | None
    late: set[Tensor]
    _odd: list[str]

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        # Process groups carry no int16 or float8: torch leaves such buffers alone, and their bytes travel.
        self.__dict__["_odd"] = odd = _odd_buffers(module)
        with _ignoring(module, odd):
            super().__init__(module, **arguments)
        if odd and self.broadcast_buffers:
            self._default_broadcast_coalesced(self._odd_bytes())  # type: ignore[no-untyped-call]
        # A rank may leave out any of them, and torch then writes the others' average.
        asked = _trained(module) if self.find_unused_parameters else _asked(module)
        self.__dict__.update(asked=asked, before=[None] * len(asked), open=False)
        self.__dict__.update(awaited=["none"] * len(asked), last=None, checked=False, late=set())
        ignored = self.parameters_to_ignore
        self.reduced = [n for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
        self._watch()

    def _watch(self) -> None:
        late = _adding(self.late)
        self._hooks = [_when_unfrozen(p, late) for p in self.module.parameters() if _may_train_later(p)]
        notes = [_Note(self, number) for number in range(len(self.asked))]
        self._hooks += [
            p.register_post_accumulate_grad_hook(note) for p, note in zip(self.asked, notes, strict=True)
        ]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, whose gradients are reduced in backward."""
        if torch.is_grad_enabled():
            state = self.__dict__  # the module's own __setattr__ takes 2 µs
            asked = state["asked"]
            word = _READY if state["require_backward_grad_sync"] else "quiet"
            state["awaited"], state["open"] = [word] * len(asked), True
            state["before"] = [None if p.grad is None else ref(p.grad) for p in asked]
            if not state["checked"]:
                refuse_hooks(self.module)
                state["checked"] = True
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of buffers that are broadcast, or of buckets that are laid out
            run = RUNS.get(self, _no_run)()
            lost = None if run is None else run.lost_peer("forward", error)
            if lost is None:
                raise
            raise lost from error

    def __getstate__(self) -> dict[str, Any]:
        # A pickle holds no weak references, and no hooks: they reach torch's reducer. A copy's gradients
        # travel uncompressed: torch registers the hook that compresses them for its reducer alone.
        held: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        held |= {"before": [None] * len(self.asked), "late": set(), "_hooks": [], "_comm_hooks": []}
        # Its reducer has yet to record a static graph, and no no_sync will end for it.
        held["_static_graph_delay_allreduce_enqueued"] = False
        return held | {"require_backward_grad_sync": True, "require_forward_param_sync": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        COPIES.add(self)
        self._watch()

    def await_backward(self) -> None:
        """Count the next backward as reduced, whatever its forward ran in.

        The caller has prepared torch's reducer for it.
        """
        self.__dict__["awaited"] = [_READY] * len(self.awaited)

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()  # type: ignore[no-untyped-call]
        self.modules_buffers += self._odd_bytes()

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)  # type: ignore[no-untyped-call]
        if self._odd and self.broadcast_buffers:
            self._default_broadcast_coalesced(  # type: ignore[no-untyped-call]
                self._odd_bytes(), authoritative_rank=self._authoritative_rank
            )

    def _odd_bytes(self) -> list[Tensor]:
        """Return the memory of the buffers that cannot travel otherwise.

        They may be others by now.
        """
        buffers = dict(self.module.named_buffers()) if self._odd else {}
        return [buffers[name].detach().view(-1).view(torch.uint8) for name in self._odd if name in buffers]

    def refuse(self, last: str | None) -> None:
        """Raise AccelError if there are gradients that are this rank's alone.

        `last`: of the last backward.
        """
        kind = type(self.module).__name__
        if last not in (None, _READY) and any(p.grad is not None for p in self.module.parameters()):
            raise AccelError(
                f"ddp: the last backward of this {kind} {_REASONS[str(last)]}; each rank would"
                " train a model of its own\n"
                + _REMEDIES.get(str(last), "call the prepared model, then backward once")
            )
        late = [n for n, p in self.module.named_parameters() if p in self.late and p.grad is not None]
        if late:
            raise AccelError(
                f"ddp: {len(late)} parameter(s) of this {kind} were frozen when it was prepared and train"
                f" now ({late[0]}): their gradients are not reduced\n"
                "unfreeze before prepare, or call accelerator.free_memory() and prepare the model again"
            )

    def is_by_hand(self) -> bool:
        """Return whether gradients came since the last forward, without a backward."""
        found = zip(self.asked, self.awaited, self.__dict__["before"], strict=True)
        return self.__dict__["open"] and any(
            word == _READY and p.grad is not None and (before is None or before() is not p.grad)
            for p, word, before in found
        )

    def refuse_unfinished(self, error: RuntimeError) -> None:
        """Raise AccelError for parameters that the last backward left out.

        torch still waits for their gradients.

        `error`: of the reducer.
        """
        found = re.search(r"did not receive grad for rank \d+:([\d ]+)", str(error))
        left = [self.reduced[int(index)] for index in found[1].split()] if found else []
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise AccelError(
            f"ddp: the last backward of this {type(self.module).__name__} gave no gradient to"
            f" {', '.join(left[:3]) or 'some parameters'}{more}, so gradients are not averaged\n"
            "set ddp.find_unused_parameters: true, or use every parameter in each loss"
        ) from error

    def release(self) -> None:
        """Take the hooks off the parameters, and drop the reducer.

        One that outlives its process group aborts some processes at exit (plain torch on its CPU backend:
        2 of 8).
        """
        for hook in self._hooks:
            hook.remove()
        self.reducer = self.logger = None  # type: ignore[assignment]
        self.__dict__["forward"] = _released


def _released(*_: object, **__: object) -> NoReturn:
    raise AccelError(
        "forward: this model's DistributedDataParallel has ended, by free_memory or end_training\n"
        "prepare the model again, or use the one inside: accelerator.unwrap_model(model)"
    )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse parameters with hooks but for those of this file.

    Those hooks would see unreduced gradients. Raises ConfigError.
    """
    hooked = [name for name, p in model.named_parameters() if any(map(_is_foreign, _hooks_of(p)))]
    if hooked:
        raise ConfigError(
            f"ddp: {hooked[0]} of the {type(model).__name__} has a hook by"
            " register_post_accumulate_grad_hook, which would see, or step with, the gradient of this rank"
            " alone\n"
            "do its work between backward and optimizer.step(), or choose strategy fsdp"
        )


def _hooks_of(parameter: Tensor) -> Iterable[Callable[[Tensor], None]]:
    return (parameter._post_accumulate_grad_hooks or {}).values()


def _is_foreign(hook: Callable[[Tensor], None]) -> bool:
    # Another model that shares the parameter, or a wrapper that a failed `prepare` left, has its own here.
    return getattr(hook, "__module__", None) != __name__


def _adding(late: set[Tensor]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        late.add(parameter)

    return note


def follow(unit: Unit, optimizer: Optimizer) -> Callable[[], None]:
    """Check the unit's models before each step of the optimizer.

    The returned function ends it.
    """
    watched: list[tuple[DistributedDataParallel, dict[str, Any], set[Tensor], bool, Callable[[], None]]] = []
    count = 0

    def find() -> int:
        models = [model for model in unit.wrapped if isinstance(model, DistributedDataParallel)]
        watched[:] = [
            (model, model.__dict__, model.late, model.static_graph, model.reducer._check_reducer_finalized)
            for model in models
        ]
        return len(unit.wrapped)

    def check(optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        nonlocal count
        if (len(args) > 1 and args[1] is not None) or (kwargs and kwargs.get("closure") is not None):
            return _checked(check, *args, **kwargs or {})  # the closure has yet to compute the gradients
        if count != len(unit.wrapped):
            count = find()
        for model, state, late, is_static, check_finished in watched:
            last = state["last"]
            if is_static:
                state["awaited"] = ["none"] * len(state["awaited"])
            if last is None and model.is_by_hand():
                last = _BY_HAND
            if late or (last is not None and last != _READY):
                if not unit.is_in_no_sync:
                    model.refuse(last)
                late.clear()
            state["last"] = None  # after a refusal it stays, as do the gradients
            try:
                check_finished()
            except RuntimeError as error:
                model.refuse_unfinished(error)
        return None

    return before_step(optimizer, check)


def _checked(
    check: Callable[[Optimizer], None],
    optimizer: Optimizer,
    closure: Callable[[], Any],
    *more: Any,
    **options: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a step, with a closure that checks the gradients it computed."""

    def watched() -> Any:
        loss = closure()
        check(optimizer)
        return loss

    return (optimizer, watched, *more), options


def _no_run() -> None:
    return None


def _asked(module: nn.Module) -> list[nn.Parameter]:
    """Return the first trained parameter of the module and of each callable part."""
    parts = (module, *module.children())
    return list(dict.fromkeys(p for part in parts for p in _trained(part)[:1]))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _may_train_later(parameter: Tensor) -> bool:
    floating = parameter.is_floating_point() or parameter.is_complex()
    return floating and not parameter.requires_grad and not parameter.is_inference()


def _when_unfrozen(parameter: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
    """Note when a frozen parameter gets a gradient.

    A step then has nothing to ask.
    """
    parameter.requires_grad_(True)  # torch takes a hook of what trains only, and keeps it
    hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
    parameter.requires_grad_(False)
    return hook


class _Note:
    """A hook that notes whether the gradient of a parameter that is asked is reduced."""

    def __init__(self, model: DistributedDataParallel, number: int) -> None:
        self.state, self.number = model.__dict__, number
        self.once = not model.static_graph  # else a parameter may be ready several times in one backward
        # A conversion gives the parameter another node of the graph, which torch's reducer does not know.
        self.reached = reached = list[bool]()
        _node_of(model.asked[number]).register_prehook(lambda _: reached.append(True))

    def __call__(self, parameter: Tensor) -> None:
        awaited = self.state["awaited"]
        word = awaited[self.number]
        is_known = bool(self.reached)
        self.reached.clear()
        if word == _READY:
            self.state["open"] = False
            if self.once:
                awaited[self.number] = "used"
            if not is_known:
                word = _CONVERTED
        elif any(other is not self and other.is_reducing() for other in _notes_of(parameter)):
            return  # this was the backward of another model, which shares the parameter
        if self.state["last"] != _CONVERTED:
            self.state["last"] = word

    def is_reducing(self) -> bool:
        """Return whether the model reduces in this backward."""
        return _READY in (self.state["awaited"][self.number], self.state["last"])


@torch.enable_grad()
def _node_of(parameter: nn.Parameter) -> Any:
    """Return the node of the graph that accumulates the parameter's gradient."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _notes_of(parameter: Tensor) -> list[_Note]:
    return [hook for hook in _hooks_of(parameter) if isinstance(hook, _Note)]


def _odd_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that no group carries, and whose bytes lie side by side."""
    buffers = module.named_buffers()
    return [name for name, each in buffers if each.dtype not in CARRIED and each.is_contiguous()]


@contextmanager
def _ignoring(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Have torch's wrapper leave these alone too, while it is made."""
    before = module.__dict__.get(_IGNORED)
    module.__dict__[_IGNORED] = [*(before or ()), *names]
    try:
        yield
    finally:
        del module.__dict__[_IGNORED]
        if before is not None:
            module.__dict__[_IGNORED] = before
