"""The script `accelerate`."""

from __future__ import annotations

from accel_compat.commands import accelerate as main

__all__ = ["main"]


if __name__ == "__main__":
    main()
