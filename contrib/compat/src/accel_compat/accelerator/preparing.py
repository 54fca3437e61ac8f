"""`prepare` by Accelerate's rules.

Objects that core refuses are returned as they are, with a warning. An optimizer whose model is not prepared
is kept aside (it is loose), and adopted once its model comes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import accel_core
from accel_compat.accelerator import deepspeed_engine as _engine
from accel_compat.accelerator.prepared import AcceleratedOptimizer, AcceleratedScheduler
from accel_compat.loaders.order import draw_seeds
from accel_compat.loaders.prepared import wrap_loader
from accel_compat.notices import warn_once
from accel_core import PreparedLoader, PreparedOptimizer, PreparedScheduler, kind_of

_core_prepare = accel_core.Accelerator.prepare


def prepare(
    accelerator: Any,
    args: Sequence[Any],
    places: Sequence[bool | None] | None,
    strategy: str | None,
    name: str | None,
) -> list[Any]:
    """Return the prepared objects, in the order of the arguments."""
    if getattr(accelerator.state, "megatron_lm_plugin", None) is not None:
        from accel_compat.accelerator.megatron import for_megatron

        args = for_megatron(accelerator, args)
    if places is not None and len(places) != len(args):
        raise ValueError(
            f"`device_placement` should be a list with {len(args)} elements (the number of objects passed)."
        )
    results = _kept_aside(accelerator, args)
    ours = [number for number, thing in enumerate(args) if results[number] is None and thing is not None]
    adopted = _adopted(accelerator, args, [args[number] for number in ours])
    if ours or adopted:
        before = list(accelerator.run.units)
        asked = [None] * len(args) if places is None else places
        placed = [_is_placed(accelerator, args[number], asked[number]) for number in ours]
        draw_seeds((args[number] for number in ours), accelerator.run)
        prepared = _core_prepare(
            accelerator,
            *(args[number] for number in ours),
            *(each.optimizer for each in adopted),
            device_placement=[*placed, *(True for _ in adopted)],
            strategy=strategy or _selected(accelerator),
            name=name,
        )
        made = prepared if len(ours) + len(adopted) > 1 else (prepared,)
        for number, thing in zip(ours, made, strict=False):
            results[number] = _dressed(accelerator, thing)
        for proxy, made_now in zip(adopted, made[len(ours) :], strict=True):
            _settle(accelerator, proxy, made_now)
        if accelerator.state.deepspeed_plugin is not None:
            new = [unit for unit in accelerator.run.units if unit not in before]
            _engine.fill(accelerator.state.deepspeed_plugin, new)
    for thing in args:
        if isinstance(thing, AcceleratedScheduler) and "_is_accelerate_prepared" in vars(thing):
            _take_back(accelerator, thing)
    return results


def _is_placed(accelerator: Any, thing: Any, place: bool | None) -> bool:
    """Return whether prepare moves the object to the device.

    A model that a device map has placed stays where it is.

    Raises:
        ValueError: a device map has placed it, and there are several processes.
    """
    usual = accelerator.run.config.device_placement if place is None else place
    if not isinstance(thing, torch.nn.Module) or not accelerator.verify_device_map(thing):
        return bool(usual)
    bypass = os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") == "true"
    if accelerator.run.world.size > 1 and not bypass:
        raise ValueError(
            "You can't train a model that has been loaded with `device_map='auto'` in any distributed"
            " mode. Please rerun your script specifying `--num_processes=1` or by launching with"
            " `python {myscript.py}`."
        )
    return False


def _selected(accelerator: Any) -> str | None:
    """Return the name of the selected DeepSpeedPlugin, where there are several."""
    plugins = accelerator.state.deepspeed_plugins
    if not isinstance(plugins, dict):
        return None
    return next((name for name, plugin in plugins.items() if plugin.selected), None)


# -- objects that core does not prepare ----------------------------------------------------------


def _kept_aside(accelerator: Any, args: Sequence[Any]) -> list[Any]:
    """Return the results for objects that core does not prepare, and None for the others."""
    kinds = [None if thing is None else kind_of(accelerator.run, thing) for thing in args]
    results: list[Any] = [None] * len(args)
    # Schedulers come last: what becomes of their optimizers is known then.
    for number in sorted(range(len(args)), key=lambda number: kinds[number] == "scheduler"):
        results[number] = _aside(accelerator, args[number], kinds[number], args)
    return results


def _aside(accelerator: Any, thing: Any, kind: str | None, args: Sequence[Any]) -> Any:
    if thing is None or isinstance(thing, (AcceleratedOptimizer, AcceleratedScheduler)):
        return thing
    if kind is None:
        warn_once(f"prepare does not take a {type(thing).__name__}; it is returned unchanged")
        return thing
    if isinstance(thing, torch.optim.Optimizer) and _is_loose(accelerator, thing, args):
        warn_once(
            f"prepare: no prepared model has the parameters of the {type(thing).__name__}; their"
            " gradients are not reduced. Prepare an optimizer with its model"
        )
        return _keep_loose(accelerator, _marked(AcceleratedOptimizer(thing)))
    if kind == "scheduler":
        followed = getattr(thing, "optimizer", None)
        is_loose = any(followed is each.optimizer for each in accelerator._loose)
        comes = any(followed is each for each in args) and not is_loose
        if not comes and accelerator.run.prepared.proxy_of(followed) is None:
            return follow_all(accelerator, thing)
    return None


def _is_loose(accelerator: Any, optimizer: Any, args: Iterable[Any]) -> bool:
    """Return whether no prepared model, and none among these, has its parameters."""
    # An engine may have put parameters of its own into one that it has taken.
    prepared = accelerator.run.prepared
    if prepared.proxy_of(optimizer) is not None or isinstance(optimizer, PreparedOptimizer):
        return False
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    models = (thing for thing in args if isinstance(thing, torch.nn.Module))
    return prepared.units_of(mine) == {None} and not any(
        parameter in mine for model in models for parameter in model.parameters()
    )


def _keep_loose(accelerator: Any, proxy: AcceleratedOptimizer) -> AcceleratedOptimizer:
    proxy.__dict__["run"] = accelerator.run
    accelerator._loose.append(proxy)
    accelerator.run.registered.append(proxy)
    return proxy


def _adopted(accelerator: Any, args: Sequence[Any], things: Iterable[Any]) -> list[AcceleratedOptimizer]:
    """Return the optimizers whose model comes now, after they were prepared.

    Some are loose. Others were prepared before `free_memory`, or by another Accelerator: they are as if they
    had been prepared without their model.
    """
    models = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    coming = {parameter for model in models for parameter in model.parameters()}
    adopted = [
        proxy
        for proxy in accelerator._loose
        if any(p in coming for group in proxy.param_groups for p in group["params"])
    ]
    for thing in args:
        if not isinstance(thing, AcceleratedOptimizer) or thing.unit is None or thing in adopted:
            continue
        if accelerator.run.prepared.proxy_of(thing) is not None:
            continue
        if _is_loose(accelerator, thing.optimizer, args):
            thing.__init__(thing.optimizer, scaler=thing.scaler)  # type: ignore[misc]
            _keep_loose(accelerator, thing)
        else:
            adopted.append(thing)
    return adopted


def _settle(accelerator: Any, proxy: AcceleratedOptimizer, made: PreparedOptimizer) -> None:
    """Let the proxy that the program holds be the one that the run knows."""
    proxy.__class__ = AcceleratedOptimizer
    vars(proxy).pop("step", None)  # it refused, once its run had ended or forgotten it
    vars(proxy).update(vars(made))
    run = accelerator.run
    known, ordered = run.prepared.optimizers, run.prepared.ordered
    known[:] = [(given, proxy if each is made else each) for given, each in known]
    ordered[:] = [proxy if each is made else each for each in ordered]
    accelerator._loose[:] = [each for each in accelerator._loose if each is not proxy]
    run.registered[:] = [each for each in run.registered if each is not proxy]


# -- what `prepare` returns ----------------------------------------------------------------------


def _dressed(accelerator: Any, thing: Any) -> Any:
    """Give an object that core has prepared Accelerate's class and attributes."""
    if isinstance(thing, PreparedOptimizer):
        if not isinstance(thing, AcceleratedOptimizer):  # the run knows this very object
            thing.__class__ = AcceleratedOptimizer
            thing.__dict__.update(scaler=thing.unit.scaler, device_placement=True)
    elif isinstance(thing, PreparedScheduler):
        return _scheduled(accelerator, thing.scheduler, thing._optimizers, thing._follows)
    elif isinstance(thing, PreparedLoader):
        thing = wrap_loader(thing)
    return None if thing is None else _marked(thing)


def _scheduled(
    accelerator: Any, scheduler: Any, optimizers: Sequence[Any], follows: bool
) -> AcceleratedScheduler:
    split = accelerator.run.config.data.split_batches
    made: AcceleratedScheduler = _marked(AcceleratedScheduler(scheduler, optimizers, follows, split))
    made.__dict__["gradient_state"] = accelerator.gradient_state
    accelerator._stepping.append(made)
    return made


def follow_all(accelerator: Any, scheduler: Any) -> AcceleratedScheduler:
    """Wrap a scheduler that no unit saves; without an optimizer it follows all."""
    followed, proxies = getattr(scheduler, "optimizer", None), optimizers_of(accelerator)
    own = [proxy for proxy in proxies if followed in (proxy, proxy.optimizer)]
    follows = accelerator.run.config.step_scheduler_with_optimizer
    made = _scheduled(accelerator, scheduler, own or proxies, follows)
    accelerator.run.registered.append(made)
    return made


def _take_back(accelerator: Any, scheduler: AcceleratedScheduler) -> None:
    """Have a scheduler follow this run.

    It was prepared before `free_memory`, or by another Accelerator.
    """
    if any(scheduler is each for each in accelerator._stepping):
        return
    if accelerator.run.prepared.proxy_of(scheduler.scheduler.optimizer) is None:
        accelerator.run.registered.append(scheduler)
    else:
        made = _core_prepare(accelerator, scheduler.scheduler)
        scheduler.__dict__.update(_optimizers=made._optimizers, optimizers=list(made._optimizers))
    scheduler.__dict__["gradient_state"] = accelerator.gradient_state
    accelerator._stepping.append(scheduler)


def optimizers_of(accelerator: Any) -> list[Any]:
    """Return all optimizers that `prepare` has returned."""
    return [*(proxy for _, proxy in accelerator.run.prepared.optimizers), *accelerator._loose]


def _marked(thing: Any) -> Any:
    vars(thing)["_is_accelerate_prepared"] = True  # of the proxy, not of what it hands attributes to
    return thing
