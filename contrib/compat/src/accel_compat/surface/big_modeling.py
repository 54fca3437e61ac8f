"""Models on the meta device, or offloaded in parts."""

from accel_compat.big_models.cpu_offload import cpu_offload_with_hook
from accel_compat.big_models.dispatching import *
from accel_compat.big_models.layerwise_casting import attach_layerwise_casting_hooks
from accel_compat.modeling.init_on_device import *
from accel_compat.modeling.sizes import check_device_map
