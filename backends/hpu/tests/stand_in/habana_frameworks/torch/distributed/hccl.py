"""Stands for the module whose import registers HCCL."""
