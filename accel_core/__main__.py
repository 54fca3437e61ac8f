"""`python -m accel_core`, where the console script is not on the path."""

from __future__ import annotations

from accel_core.cli import main

if __name__ == "__main__":
    main()
