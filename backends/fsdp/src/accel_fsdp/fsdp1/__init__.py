"""fsdp_version 1: torch's FullyShardedDataParallel."""
