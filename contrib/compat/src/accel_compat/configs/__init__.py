"""Accelerate's enums and config classes, translated to those of accel-core.

Some are translated to those of its packages.
"""
