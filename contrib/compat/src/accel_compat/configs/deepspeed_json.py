"""DeepSpeed's configuration, and stand-ins for what its JSON describes."""

from __future__ import annotations

import base64
import json
import os
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from accel_compat.unsupported import of_package

_stand_in = partial(of_package, "accel_deepspeed", "accelerate.utils.deepspeed")
DummyOptim, DummyScheduler = _stand_in("DummyOptim"), _stand_in("DummyScheduler")


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected DeepSpeedPlugin of an AcceleratorState."""
    if state.deepspeed_plugin is None:
        raise ValueError("Couldn't retrieve the active `DeepSpeedPlugin` as none were enabled.")
    return state.deepspeed_plugin


class HfDeepSpeedConfig:
    """A DeepSpeed configuration: a dict, the path of a JSON file, or base64 of JSON."""

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Note the ZeRO stage, and whether anything is offloaded."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = {
            self.get_value(f"zero_optimization.{what}.device")
            for what in ("offload_optimizer", "offload_param")
        }
        self._offload = bool(devices & {"cpu", "nvme"})

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Return (dict that holds a dotted key's last part, that part).

        The dict is None if it is absent.
        """
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part)
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key and what is under it."""
        node, key = self.find_config_node(ds_key_long)
        if node is None and must_exist:
            raise ValueError(f"Can't find {ds_key_long} entry in the config: {self.config}")
        if node is not None:
            node.pop(key, None)

    def is_true(self, ds_key_long: str) -> bool:
        """Tell whether it is there and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Tell whether it is there and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Tell whether the ZeRO stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Tell whether the ZeRO stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Tell whether anything is offloaded."""
        return self._offload


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return deepcopy(given)
    if isinstance(given, (str, os.PathLike)) and os.path.exists(given):
        text = Path(given).read_text(encoding="utf-8")
    else:
        try:
            text = base64.urlsafe_b64decode(given).decode("utf-8")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                "Expected a string path to an existing deepspeed config, or a dictionary, or a"
                " base64 encoded string."
                f" Received: {given}"
            ) from error
    read: dict[str, Any] = json.loads(text)
    return read
