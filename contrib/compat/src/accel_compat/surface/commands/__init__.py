"""Accelerate's command line: `accel` and `accel compat` stand for it."""
