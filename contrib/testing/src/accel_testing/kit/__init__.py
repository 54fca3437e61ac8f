"""The conformance kit: what a stack of plugins must do, as tests by level.

0 packaging, 1 device, 2 training (against a plain PyTorch loop), 3 processes, 4 checkpoints. The checks run
in pytest; what they observe runs in processes of its own (`tasks_*.py`), one world after the other.
"""
