"""Process groups, collectives over nested structures, and random streams.

Files, each above those that it uses:

    collectives      gather, reduce, ...: public by `from accel_core import ops`
      exchange         one call: ranks are compared, small payloads travel along
        nested           walk structures of tensors
        packing          tensors as one run of bytes
      process_group    torch's groups: made, counted, and named in errors
    random, streams  seeds and generators of ranks, random streams of split units
    logging          loggers that know their rank
    mailbox          messages of ranks through the store, from any thread
    silence          requests to a store whose machine is silent end
    forks            forked children leave what they inherit alone
    progress         what is under way, where people wait for it
    stderr           lines that never fail the work they tell of
"""

from __future__ import annotations
