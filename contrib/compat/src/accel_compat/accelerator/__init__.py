"""Accelerator, and the optimizers and schedulers that its `prepare` returns."""
