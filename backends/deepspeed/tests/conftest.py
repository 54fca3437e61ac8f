"""Where DeepSpeed is not installed, only what needs none of it runs; workers import it once.

With what it imports of torch it costs a worker two seconds.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

collect_ignore: list[str] = []
if find_spec("deepspeed") is None:
    tests = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [file.name for file in tests if file.name != "test_deepspeed_config.py"]
else:
    os.environ.setdefault("ACCEL_TEST_PRELOAD", "torch._inductor.compile_fx,deepspeed")
