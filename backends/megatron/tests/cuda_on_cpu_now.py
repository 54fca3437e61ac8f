"""`cuda_on_cpu` for the processes of a test server that imports this."""

from __future__ import annotations

import cuda_on_cpu

cuda_on_cpu.install()
