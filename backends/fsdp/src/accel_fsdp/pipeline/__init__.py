"""Pipeline parallelism: FSDP 2 of a model that is cut into stages, run by schedules of torch."""
