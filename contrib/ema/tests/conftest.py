"""DeepSpeed and what it imports of torch cost a worker two seconds: they are imported once for all."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("deepspeed") is not None:
    os.environ.setdefault("ACCEL_TEST_PRELOAD", "torch._inductor.compile_fx,deepspeed")
