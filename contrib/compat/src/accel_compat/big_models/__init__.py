"""Models larger than a device: Accelerate's names, over accel-big-models where weights are offloaded."""
