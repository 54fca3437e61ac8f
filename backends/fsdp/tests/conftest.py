"""What FSDP's states and stages import of torch costs a worker half a second: it is imported once for all."""

from __future__ import annotations

import os

os.environ.setdefault("ACCEL_TEST_PRELOAD", "torch.distributed.checkpoint,torch.distributed.pipelining")
