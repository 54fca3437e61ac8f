"""Models on the meta device, or another, from the start."""

from accel_compat.modeling.init_on_device import *
