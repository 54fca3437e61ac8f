"""`accelerate estimate-memory`."""

from functools import partial

from accel_compat.launch.commands import accelerate
from accel_compat.launch.memory_estimate import *

main = partial(accelerate, "estimate-memory")


if __name__ == "__main__":
    main()
