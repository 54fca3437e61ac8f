"""FSDP of version 2, and what all versions have in common: groups, first weights, gradients, norms, state."""
