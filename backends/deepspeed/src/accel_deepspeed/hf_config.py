"""DeepSpeed's settings with the questions that transformers asks of them."""

from __future__ import annotations

from typing import Any

from accel_deepspeed import settings

__all__ = ["HfDeepSpeedConfig"]


class HfDeepSpeedConfig:
    """Settings in a mapping, a JSON file or base64 text.

    `config` holds them, and may be changed.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = settings.read(config_file_or_dict) or {}

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the section of a dotted key, or None, and the key's last part."""
        section, _, key = ds_key_long.rpartition(".")
        found = settings.get(self.config, section) if section else self.config
        return (found if isinstance(found, dict) else None), key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key."""
        return settings.get(self.config, ds_key_long, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a dotted key, with all under it."""
        section, key = self.find_config_node(ds_key_long)
        if section is not None and key in section:
            del section[key]
        elif must_exist:
            raise ValueError(f"there is no {ds_key_long} in {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return True if the key is set to true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return True if the key is set to false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return True if gradients are sharded, and weights are not."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return True if weights are sharded."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return True if weights or optimizer state live on the CPU or on NVMe."""
        places = (
            self.get_value(f"zero_optimization.offload_{what}.device") for what in ("param", "optimizer")
        )
        return any(place in ("cpu", "nvme") for place in places)
