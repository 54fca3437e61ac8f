"""`prepare` by Accelerate's rules.

Objects that core refuses are returned as they are, with a warning.
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
from accel_compat.loaders.sharing import skip_first_batches
from accel_compat.modeling.wrappers import extract_model_from_parallel
from accel_compat.notices import warn_once
from accel_compat.unsupported import NotServedError
from accel_core import PreparedLoader, PreparedOptimizer, PreparedScheduler, kind_of


class Preparing(accel_core.Accelerator):
    """Mixin of Accelerator: `prepare`."""

    state: Any
    gradient_state: Any
    _count: int
    verify_device_map: Any
    _loose: list[AcceleratedOptimizer]
    """Optimizers whose model is not prepared (yet)."""
    _stepping: list[AcceleratedScheduler]

    def prepare(
        self,
        *args: Any,
        device_placement: Sequence[bool | None] | None = None,
        strategy: str | None = None,
        name: str | None = None,
    ) -> Any:
        """Prepare what can be prepared; anything else comes back as it is."""
        self._apply_settings()
        if getattr(self.state, "megatron_lm_plugin", None) is not None:
            from accel_compat.accelerator.megatron import for_megatron

            args = tuple(for_megatron(self, args))
        places = [None] * len(args) if device_placement is None else device_placement
        if len(places) != len(args):
            raise ValueError(
                f"`device_placement` should be a list with {len(args)} elements (the number of objects"
                " passed)."
            )
        kinds = [None if thing is None else kind_of(self.run, thing) for thing in args]
        results: list[Any] = [None] * len(args)
        for number in sorted(range(len(args)), key=lambda number: kinds[number] == "scheduler"):
            results[number] = self._aside(args[number], kinds[number], args)
        ours = [number for number, thing in enumerate(args) if results[number] is None and thing is not None]
        adopted = self._adopted([args[number] for number in ours]) + self._forgotten_optimizers(args)
        if ours or adopted:
            before = list(self.run.units)
            usual = self.run.config.device_placement
            placed = [
                (usual if (place := places[number]) is None else place) and not self._is_spread(args[number])
                for number in ours
            ]
            draw_seeds((args[number] for number in ours), self.run)
            prepared = super().prepare(
                *(args[number] for number in ours),
                *(each.optimizer for each in adopted),
                device_placement=[*placed, *(True for _ in adopted)],
                strategy=strategy or self._selected(),
                name=name,
            )
            made = prepared if len(ours) + len(adopted) > 1 else (prepared,)
            for number, thing in zip(ours, made, strict=False):
                results[number] = self._dressed(thing)
            for proxy, made_now in zip(adopted, made[len(ours) :], strict=True):
                self._settle(proxy, made_now)
            if self.state.deepspeed_plugin is not None:
                new = [unit for unit in self.run.units if unit not in before]
                _engine.fill(self.state.deepspeed_plugin, new)
        for thing in args:
            if isinstance(thing, AcceleratedScheduler) and "_is_accelerate_prepared" in vars(thing):
                self._take_back(thing)
        return results[0] if len(results) == 1 else tuple(results)

    def _is_spread(self, thing: Any) -> bool:
        """Tell whether a device map has placed a model, which then stays where it is.

        Raises:
            ValueError: there are several processes.
        """
        if not isinstance(thing, torch.nn.Module) or not self.verify_device_map(thing):
            return False
        bypass = os.environ.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") == "true"
        if self.run.world.size > 1 and not bypass:
            raise ValueError(
                "You can't train a model that has been loaded with `device_map='auto'` in any distributed"
                " mode. Please rerun your script specifying `--num_processes=1` or by launching with"
                " `python {myscript.py}`."
            )
        return True

    def _apply_settings(self) -> None:
        """Hand on the settings that were changed."""

    def _aside(self, thing: Any, kind: str | None, args: Sequence[Any]) -> Any:
        """Give the result for an object that core does not prepare, else None."""
        if thing is None:
            return None
        if isinstance(thing, (AcceleratedOptimizer, AcceleratedScheduler)):
            return thing
        if kind is None:
            warn_once(f"prepare does not take a {type(thing).__name__}; it is returned unchanged")
            return thing
        if isinstance(thing, torch.optim.Optimizer) and self._is_loose(thing, args):
            return self._handed_out(thing)
        if kind == "scheduler":
            followed = getattr(thing, "optimizer", None)
            is_there = any(followed is each for each in args) and all(
                followed is not each.optimizer for each in self._loose
            )
            if not is_there and self.run.prepared.proxy_of(followed) is None:
                return self._scheduled_by_itself(thing)
        return None

    def _is_loose(self, optimizer: Any, args: Iterable[Any]) -> bool:
        """Tell whether no prepared model, and none among these, has its parameters."""
        # An engine may have put parameters of its own into one that it has taken.
        if self.run.prepared.proxy_of(optimizer) is not None or isinstance(optimizer, PreparedOptimizer):
            return False
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        models = (thing for thing in args if isinstance(thing, torch.nn.Module))
        return self.run.prepared.parameters.units_of(mine) == {None} and not any(
            parameter in mine for model in models for parameter in model.parameters()
        )

    def _handed_out(self, optimizer: Any) -> AcceleratedOptimizer:
        warn_once(
            f"prepare: no prepared model has the parameters of the {type(optimizer).__name__}; their"
            " gradients are not reduced. Prepare an optimizer with its model"
        )
        proxy: AcceleratedOptimizer = _marked(AcceleratedOptimizer(optimizer))
        self._keep_loose(proxy)
        return proxy

    def _keep_loose(self, proxy: AcceleratedOptimizer) -> None:
        proxy.__dict__["run"] = self.run
        self._loose.append(proxy)
        self.run.registered.append(proxy)

    def _adopted(self, things: Iterable[Any]) -> list[AcceleratedOptimizer]:
        """Optimizers that were prepared before the models, which come now."""
        models = [thing for thing in things if isinstance(thing, torch.nn.Module)]
        coming = {parameter for model in models for parameter in model.parameters()}
        return [
            proxy
            for proxy in self._loose
            if any(p in coming for group in proxy.param_groups for p in group["params"])
        ]

    def _forgotten_optimizers(self, args: Sequence[Any]) -> list[AcceleratedOptimizer]:
        """Optimizers that were prepared before `free_memory` or by another Accelerator.

        One whose model is not prepared is as if it had been prepared without.
        """
        forgotten = []
        for thing in args:
            if isinstance(thing, AcceleratedOptimizer) and thing.unit is not None and thing not in forgotten:
                if self.run.prepared.proxy_of(thing) is None and not self._is_loose(thing.optimizer, args):
                    forgotten.append(thing)
                elif self.run.prepared.proxy_of(thing) is None:
                    thing.__init__(thing.optimizer, scaler=thing.scaler)  # type: ignore[misc]
                    self._keep_loose(thing)
        return forgotten

    def _take_back(self, scheduler: AcceleratedScheduler) -> None:
        """Have a scheduler follow this run.

        It was prepared before `free_memory`, or by another Accelerator.
        """
        if any(scheduler is each for each in self._stepping):
            return
        if self.run.prepared.proxy_of(scheduler.scheduler.optimizer) is None:
            self.run.registered.append(scheduler)
        else:
            made = super().prepare(scheduler.scheduler)
            scheduler.__dict__.update(_optimizers=made._optimizers, optimizers=list(made._optimizers))
        scheduler.__dict__["gradient_state"] = self.gradient_state
        self._stepping.append(scheduler)

    def _settle(self, proxy: AcceleratedOptimizer, made: PreparedOptimizer) -> None:
        """Let the proxy that the program holds be the one that the run knows."""
        proxy.__class__ = AcceleratedOptimizer
        vars(proxy).pop("step", None)  # it refused, once its run had ended or forgotten it
        vars(proxy).update(vars(made))
        known, ordered = self.run.prepared.optimizers, self.run.prepared.ordered
        known[:] = [(given, proxy if each is made else each) for given, each in known]
        ordered[:] = [proxy if each is made else each for each in ordered]
        self._loose = [each for each in self._loose if each is not proxy]
        self.run.registered[:] = [each for each in self.run.registered if each is not proxy]

    def _dressed(self, thing: Any) -> Any:
        if isinstance(thing, PreparedOptimizer):
            if not isinstance(thing, AcceleratedOptimizer):  # the run knows this very object
                thing.__class__ = AcceleratedOptimizer
                thing.__dict__.update(scaler=thing.unit.scaler, device_placement=True)
        elif isinstance(thing, PreparedScheduler):
            return self._scheduled(thing.scheduler, thing._optimizers, thing._follows)
        elif isinstance(thing, PreparedLoader):
            thing = wrap_loader(thing)
        return None if thing is None else _marked(thing)

    def _scheduled(self, scheduler: Any, optimizers: Sequence[Any], follows: bool) -> AcceleratedScheduler:
        split = self.run.config.data.split_batches
        made: AcceleratedScheduler = _marked(AcceleratedScheduler(scheduler, optimizers, follows, split))
        made.__dict__["gradient_state"] = self.gradient_state
        self._stepping.append(made)
        return made

    def _scheduled_by_itself(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler that no unit saves; without an optimizer it follows all."""
        followed = getattr(scheduler, "optimizer", None)
        own = [proxy for proxy in self._all_optimizers() if followed in (proxy, proxy.optimizer)]
        follows = self.run.config.step_scheduler_with_optimizer
        made = self._scheduled(scheduler, own or self._all_optimizers(), follows)
        self.run.registered.append(made)
        return made

    def _all_optimizers(self) -> list[Any]:
        return [*(proxy for _, proxy in self.run.prepared.optimizers), *self._loose]

    def _selected(self) -> str | None:
        """Return the name of the selected DeepSpeedPlugin, where there are several."""
        plugins = self.state.deepspeed_plugins
        if not isinstance(plugins, dict):
            return None
        return next((name for name, plugin in plugins.items() if plugin.selected), None)

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """The engine of the first model that DeepSpeed trains, as `.engine`; None before."""
        return None if self.state.deepspeed_plugin is None else _engine.wrapped(self.run.units)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the dataloader without its first batches, in each epoch."""
        return skip_first_batches(dataloader, num_batches)

    # -- one by one ------------------------------------------------------------------------------

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare one model.

        In evaluation mode the model is placed, not wrapped for training.
        """
        self._refuse_other(model, "model", "torch.nn.Module")
        few_bits = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        devices = set((getattr(model, "hf_device_map", None) or {}).values())
        if few_bits and devices & {"cpu", "disk"}:
            raise ValueError(
                "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk"
                " offload.\nload it without a device_map that names cpu or disk"
            )
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """`prepare` for one dataloader."""
        self._refuse_other(data_loader, "data_loader", "DataLoader")
        if slice_fn_for_dispatch is not None:
            raise NotServedError(
                "slice_fn_for_dispatch: batches that rank 0 reads for all are sliced along dim 0 here\n"
                "let collate_fn build batches that can be, or set dispatch_batches=False"
            )
        return super().prepare_data_loader(data_loader, device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """`prepare` for one optimizer."""
        self._refuse_other(optimizer, "optimizer", "torch.optim.Optimizer")
        return super().prepare_optimizer(optimizer)

    def _refuse_other(self, thing: Any, kind: str, name: str) -> None:
        """Raise TypeError for what is no such object, which `prepare` would return."""
        if kind_of(self.run, thing) != kind.replace("_", ""):
            raise TypeError(
                f"prepare_{kind}: a {type(thing).__name__} is not a {name}\n"
                f"pass a {name}, or call accelerator.prepare(...) with what need not be one"
            )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """`prepare` for one scheduler, of any class."""
        known = isinstance(scheduler, AcceleratedScheduler) or kind_of(self.run, scheduler) is not None
        if known:
            return super().prepare_scheduler(scheduler)
        return self._scheduled_by_itself(scheduler)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's own model without its wrappers."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"unwrap_model: a {type(model).__name__} is not a torch.nn.Module\n"
                "pass the model that accelerator.prepare(...) returned"
            )
        if self.run.prepared.form_of(model) is None:
            return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    # -- the end ---------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and give device memory back.

        Returns as many None as there are arguments.
        """
        self._loose.clear()
        self._stepping.clear()
        self._count = 0
        return super().free_memory(*objects)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these objects with the state.

        Each needs the methods `state_dict` and `load_state_dict`.
        """
        wrong = [
            f"- Item at index {number}, `{thing}`"
            for number, thing in enumerate(objects)
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"))
        ]
        if wrong:
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The"
                " following inputs are invalid:\n" + "\n".join(wrong)
            )
        super().register_for_checkpointing(*objects)


def _marked(thing: Any) -> Any:
    vars(thing)["_is_accelerate_prepared"] = True  # of the proxy, not of what it hands attributes to
    return thing
