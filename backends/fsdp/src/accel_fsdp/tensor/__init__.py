"""Tensor parallelism: the extension that splits layers by plans, and FSDP 2 of split layers."""
