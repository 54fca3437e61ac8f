"""Pipeline parallelism: a model cut into stages."""
