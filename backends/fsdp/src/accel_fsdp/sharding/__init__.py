"""FSDP 2 of torch, `fully_shard`: which modules are a group, first weights, state, gradients and norms.

Also the parts that FSDP 1 and all other rooms share. Knows experts, and no other room.
"""
