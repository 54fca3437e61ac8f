"""FSDP 1: FullyShardedDataParallel of torch, its flat vectors and its limits."""
