"""Device maps by Accelerate's rules.

Devices are filled in order, then the CPU, then the disk.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn

from accel_compat.big_models.balanced_memory import as_list, get_balanced_memory
from accel_compat.modeling.sizes import (
    check_tied_parameters_in_config,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    find_tied_parameters,
    get_max_layer_size,
    get_max_memory,
)

Named = list[tuple[str, Any]]
"""Modules, parameters and buffers by name, in the order in which they are placed."""
_LOGGER: Final = logging.getLogger("accelerate.utils.modeling")
_NOT_TIED: Final = (
    "The model weights are not tied. Please use the `tie_weights` method before using the"
    " `infer_auto_device` function."
)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Return a device map that places modules in order, as far as memory goes.

    Accelerators are filled first, then the CPU, then the disk. The first accelerator and the CPU keep room
    for the largest layer that is not placed yet.

    no_split_module_classes: names of classes whose modules stay whole.
    dtype, special_dtypes: what weights are loaded as; of all, and by name.
    clean_result: one entry for a module that is on one device as a whole.
    offload_buffers: buffers are offloaded too, so that no accelerator needs room for them.
    fallback_allocation: on a device where the next module does not fit, place any that does.
    """
    filling = _Filling(model, max_memory, as_list(no_split_module_classes), dtype, special_dtypes)
    filling.verbose, filling.fallback = verbose, fallback_allocation
    while filling.waiting:
        filling.treat(*filling.waiting.pop(0))
    if not offload_buffers:
        filling.warn_of_buffers()
    filling.tell_what_was_too_small()
    return clean_device_map(filling.placed) if clean_result else filling.placed


def map_by_word(
    model: nn.Module,
    word: str,
    max_memory: Any,
    whole: list[str] | None,
    *,
    dtype: Any = None,
    offload_buffers: bool = False,
) -> dict[str, Any]:
    """Return the device map that a word of `load_checkpoint_and_dispatch` asks for."""
    if word not in ("auto", "balanced", "balanced_low_0", "sequential"):
        raise ValueError(
            "If passing a string for `device_map`, please choose 'auto', 'balanced', 'balanced_low_0' or"
            " 'sequential'."
        )
    if word != "sequential":
        max_memory = get_balanced_memory(model, max_memory, whole, dtype, low_zero=word == "balanced_low_0")
    return infer_auto_device_map(model, max_memory, whole, dtype, offload_buffers=offload_buffers)


class _Filling:
    """Devices being filled with the modules that wait."""

    verbose = False
    fallback = False

    def __init__(self, model: nn.Module, max_memory: Any, whole: list[str], dtype: Any, special: Any) -> None:
        self.limits: dict[Any, Any] = get_max_memory(max_memory)
        self.devices = [*self.limits, *(() if "disk" in self.limits else ("disk",))]
        self.accelerators = [device for device in self.devices if device not in ("cpu", "disk")]
        # Devices on which the largest layer that was offloaded is brought back.
        self.with_room = ["mps"] if "mps" in self.accelerators else [*self.accelerators[:1], "cpu"]
        self.whole, self.dtypes = whole, {"dtype": dtype, "special_dtypes": special}
        self.sizes = compute_module_sizes(model, **self.dtypes)
        self.ties = find_tied_parameters(model)
        if not self.ties and check_tied_parameters_in_config(model):
            _LOGGER.warning(_NOT_TIED)
        self.waiting: Named = [
            *model.named_parameters(recurse=False),
            *model.named_children(),
            *model.named_buffers(recurse=False),
        ]
        self.placed: OrderedDict[str, Any] = OrderedDict()
        self.number = 0
        self.used: dict[Any, Any] = dict.fromkeys(self.devices, 0)
        self.too_small: dict[Any, Any] = {}
        self.buffers: dict[Any, int] = {}
        self.largest, self.largest_names = get_max_layer_size(self.waiting, self.sizes, whole)

    def treat(self, name: str, module: Any) -> None:
        """Place one module, or put it back, split, or for the next device."""
        self.largest_names = [
            each for each in self.largest_names if each != name and not each.startswith(f"{name}.")
        ]
        if not self.largest_names:
            self._measure_largest()
        device = self.devices[self.number]
        reserved = self.largest if device in self.with_room else 0
        limit = None if device == "disk" else self.limits[device] - reserved
        size, tied = self.sizes[name], self._tied_and_waiting(name)
        whole, tied_names, tied_modules = get_module_size_with_ties(tied, size, self.sizes, self.waiting)
        if limit is None or self.used[device] + whole <= limit:
            self._place(name, module, tied_names, device, whole)
            return
        self._say(f"not enough space on {device} for {name} (size={size}, left={limit - self.used[device]})")
        fits_alone = self.used[device] + size <= limit
        if tied and fits_alone and self._split_tied(name, module, tied_names, tied_modules):
            return
        if self.used[device] + size >= limit and self._can_be_split(module):
            self._say(f"splitting {name}")
            self.waiting = [*_parts(name, module), *self.waiting]
            self._measure_largest()
            return
        if self.used[device] == 0 and self.fallback and device != "disk":
            limit = self.limits[device] - max(self.largest, whole)
            other, part, left = fallback_allocate(self.waiting, self.sizes, limit, self.whole, self.ties)
            if other is not None:
                self.waiting = [(other, part), (name, module), *left]
                return
        if self.used[device] == 0:
            self.too_small[device] = whole + reserved
        self.used[device] += reserved
        self.number += 1
        self.waiting = [(name, module), *self.waiting]

    def _tied_and_waiting(self, name: str) -> list[str]:
        """Names of weights that are tied to those of a module, and not placed yet."""
        waiting = tuple(f"{each}." for each, _ in self.waiting)
        return [tied for tied in _tied_elsewhere(self.ties, name) if f"{tied}.".startswith(waiting)]

    def _place(self, name: str, module: Any, tied_names: list[str], device: Any, size: Any) -> None:
        self._say(f"putting {', '.join([name, *tied_names])} on {device} (size={size})")
        self.used[device] += size
        for each in (name, *tied_names):
            self.placed[each] = device
        self.waiting = [each for each in self.waiting if each[0] not in tied_names]
        if isinstance(module, nn.Module):
            buffers = compute_module_total_buffer_size(module, **self.dtypes)
            self.buffers[device] = self.buffers.get(device, 0) + buffers

    def _split_tied(self, name: str, module: Any, tied_names: list[str], tied_modules: list[Any]) -> bool:
        """Split the first divisible module whose weights are tied to this module's.

        Returns False if there is none.
        """
        for tied_name, tied_module in zip(tied_names, tied_modules, strict=True):
            if self._can_be_split(tied_module):
                self._say(f"splitting {tied_name}")
                index = [each for each, _ in self.waiting].index(tied_name)
                parts = _parts(tied_name, tied_module)
                self.waiting = [(name, module), *self.waiting[:index], *parts, *self.waiting[index + 1 :]]
                self._measure_largest()
                return True
        return False

    def _can_be_split(self, module: Any) -> bool:
        return (
            isinstance(module, nn.Module)
            and any(True for _ in module.named_children())
            and type(module).__name__ not in self.whole
        )

    def _measure_largest(self) -> None:
        modules = [(name, module) for name, module in self.waiting if isinstance(module, nn.Module)]
        self.largest, self.largest_names = get_max_layer_size(modules, self.sizes, self.whole)

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text)  # noqa: T201  asked for

    def warn_of_buffers(self) -> None:
        """Warn if no accelerator has room for the buffers of offloaded modules."""
        needed = self.buffers.get("cpu", 0) + self.buffers.get("disk", 0)
        free = [self.limits[device] - self.used[device] for device in self.accelerators]
        if needed and free and max(free) < needed:
            warnings.warn(
                f"Current model requires {needed} bytes of buffer for offloaded layers, which seems does not"
                " fit any GPU's remaining memory. If you are experiencing a OOM later, please consider using"
                " offload_buffers=True.",
                stacklevel=3,
            )

    def tell_what_was_too_small(self) -> None:
        """Log the devices on which nothing could be placed, and what they needed."""
        if self.too_small:
            lines = (f"  - {device}: {size} bytes required" for device, size in self.too_small.items())
            _LOGGER.info(
                "Based on the current allocation process, no modules could be assigned to the following"
                " devices due to insufficient memory:\n%s\nThese minimum requirements are specific to this"
                " allocation attempt and may vary. Consider increasing the available memory for these devices"
                " to at least the specified minimum, or adjusting the model config.",
                "\n".join(lines),
            )


def _parts(name: str, module: nn.Module) -> Named:
    parts = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{part}", value) for part, value in parts]


def _tied_elsewhere(ties: Sequence[Sequence[str]], name: str) -> list[str]:
    """Return names outside of a module of the weights that are tied to one inside."""
    found: list[str] = []
    for group in ties:
        outside = [each for each in group if f"{name}." not in f"{each}."]
        if 0 < len(outside) < len(group):
            found += outside
    return found


def get_module_size_with_ties(
    tied_params: list[str], module_size: int, module_sizes: dict[str, int], modules_to_treat: Named
) -> tuple[int, list[str], list[nn.Module]]:
    """Return (bytes, names, modules) of a module with the modules that it is tied to.

    bytes: of all of them together, with shared weights once. names, modules: of the others only.

    Raises:
        IndexError: a weight tied to the module's is in none of `modules_to_treat`.
    """
    tied_names: list[str] = []
    tied_modules: list[nn.Module] = []
    for tied in tied_params:
        holders = [each for each in modules_to_treat if f"{tied}.".startswith(f"{each[0]}.")]
        holder, module = holders[0]
        tied_names.append(holder)
        tied_modules.append(module)
        module_size += module_sizes[holder] - module_sizes[tied]
    return module_size, tied_names, tied_modules


def fallback_allocate(
    modules: Named,
    module_sizes: dict[str, int],
    size_limit: int | str,
    no_split_module_classes: list[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, nn.Module | None, Named]:
    """Find the first module that fits into a size, or part of a module.

    Returns its name, itself, and the modules without it; (None, None, modules) if nothing fits.
    """
    try:
        limit = convert_file_size_to_int(size_limit)
    except ValueError:
        return None, None, modules
    whole, waiting = no_split_module_classes or [], modules.copy()
    while waiting:
        name, module = waiting.pop(0)
        tied, left = _tied_elsewhere(tied_parameters or [], name), _without(modules, name)
        with suppress(IndexError):  # a weight that is tied to one of the module being placed
            if get_module_size_with_ties(tied, module_sizes[name], module_sizes, left)[0] <= limit:
                return name, module, left
        is_module = isinstance(module, nn.Module) and any(True for _ in module.children())
        if is_module and type(module).__name__ not in whole:
            waiting = [*_parts(name, module), *waiting]
    return None, None, modules


def _without(modules: Named, name: str) -> Named:
    """Split the modules above a part as far as needed, and leave the part out."""
    left: Named = []
    for each, module in modules:
        if name.startswith(f"{each}."):
            left += _without(_parts(each, module), name)
        elif each != name:
            left.append((each, module))
    return left
