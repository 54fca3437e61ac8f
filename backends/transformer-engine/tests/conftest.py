"""Transformer Engine's own Python from its wheel, over a stand-in for its extension."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

STAND_IN = str(Path(__file__).parent / "stand_in")
MEGATRON = str(Path(__file__).parents[2] / "megatron/tests")
"""With the fixture that answers `torch.cuda` for the CPU."""
collect_ignore: list[str] = []
if os.environ.get("ACCEL_TEST_VENDOR"):
    # Other processes import the stand-in too.
    sys.path[:0] = [STAND_IN, MEGATRON]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [STAND_IN, MEGATRON, os.environ.get("PYTHONPATH")])
    )
    os.environ.setdefault("ACCEL_TEST_PRELOAD", "transformer_engine.pytorch")
    if find_spec("megatron") is None or find_spec("accel_megatron") is None:
        collect_ignore.append("test_te_megatron.py")
else:  # without the wheel's folder there is nothing to test against, nor to import
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py")]
