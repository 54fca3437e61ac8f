"""The current run as Accelerate's process-wide state and functions show it."""
