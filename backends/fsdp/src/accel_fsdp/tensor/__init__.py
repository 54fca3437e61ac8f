"""Tensor parallelism: layers split over ranks."""
