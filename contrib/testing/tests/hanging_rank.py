"""A rank that hangs, in a module that is imported in no time: the others return long before it is missed."""

from __future__ import annotations

import os
import time


def hang_on(rank: int) -> None:
    if os.environ["RANK"] == str(rank):
        time.sleep(60)
