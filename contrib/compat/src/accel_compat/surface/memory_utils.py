"""The older home of `utils.memory`."""

import warnings

from accel_compat.state.memory import find_executable_batch_size

warnings.warn(
    "memory_utils has been reorganized to utils.memory; use `from accelerate import"
    " find_executable_batch_size`",
    FutureWarning,
    stacklevel=2,
)
