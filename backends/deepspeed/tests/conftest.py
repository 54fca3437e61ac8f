"""What DeepSpeed's engines import of torch costs a worker a second: it is imported once for all."""

from __future__ import annotations

import os

os.environ.setdefault("ACCEL_TEST_PRELOAD", "torch._inductor.compile_fx")
