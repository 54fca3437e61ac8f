"""Kernels of Triton, which no stand-in computes."""
