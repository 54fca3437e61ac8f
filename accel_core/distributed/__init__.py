"""Process groups, collectives over nested structures, and random streams.

Files, each above the files that it uses:

    collectives      gather, reduce, ...: public by `from accel_core import ops`
      exchange         compare the calls of all ranks; small payloads travel in the same message
        nested           walk structures of tensors
        packing          tensors of an operation as contiguous bytes
      process_group    make, share and end torch's groups; their collectives, with ranks named in errors
    together         run a step on all ranks, or raise on all ranks
    gradients        gradients of collectives
    random, streams  seeds and generators of ranks, random streams of split units
    logging          loggers that know their rank
    mailbox          messages between ranks through the store, from any thread
    silence          end requests to a store whose machine is silent
    forks            keep forked children from collecting inherited objects
    progress         show the progress of long operations
    stderr           write to stderr without ever raising
"""

from __future__ import annotations
