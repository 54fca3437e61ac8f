"""`accelerate`, as programs import it; what runs is accel-core."""

from accel_compat.import_hook import VERSION as __version__
