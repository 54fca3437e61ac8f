"""Accelerate's trackers of experiments."""
