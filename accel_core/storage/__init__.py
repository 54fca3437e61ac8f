"""Tensors and JSON on a disk or in a bucket: whole or absent, verified, readable under any split.

Knows no run, unit or Accelerator. `protocols` has what it asks of a place and of the other ranks;
docs/checkpoint-format.md says what lies in the place.
"""
