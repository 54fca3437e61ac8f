"""Transformer Engine's own Python from its wheel, over a stand-in for its extension."""

from __future__ import annotations

import os
import sys
from pathlib import Path

STAND_IN = str(Path(__file__).parent / "stand_in")
collect_ignore: list[str] = []
if os.environ.get("ACCEL_TEST_VENDOR"):
    # Other processes import the stand-in too.
    sys.path.insert(0, STAND_IN)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_IN, os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("ACCEL_TEST_PRELOAD", "transformer_engine.pytorch")
else:  # without the wheel's folder there is nothing to test against, nor to import
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py")]
