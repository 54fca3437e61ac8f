"""Comparing versions."""

from accel_compat.environment.libraries import compare_versions, is_torch_version
