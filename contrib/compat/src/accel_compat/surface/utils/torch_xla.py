"""Installing torch_xla."""

from accel_compat.environment.libraries import install_xla
