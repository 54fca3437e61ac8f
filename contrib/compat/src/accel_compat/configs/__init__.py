"""Accelerate's enums and config classes, translated to those of accel-core and its packages."""
