"""Expert parallelism: stacks of experts that are spread over ranks. Knows nothing of sharding."""
