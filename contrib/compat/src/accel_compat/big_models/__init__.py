"""Models larger than a device, by Accelerate's names.

accel-big-models does the work where weights are offloaded.
"""
