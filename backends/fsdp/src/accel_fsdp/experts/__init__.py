"""Expert parallelism: stacks of experts spread over ranks."""
