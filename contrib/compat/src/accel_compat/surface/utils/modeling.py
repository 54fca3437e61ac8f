"""Sizes, names, ties, places and files of a model's weights."""

from accel_compat.big_models.balanced_memory import get_balanced_memory
from accel_compat.big_models.device_maps import *
from accel_compat.big_models.offloaded_state import *
from accel_compat.modeling.loading import *
from accel_compat.modeling.sizes import *
from accel_compat.modeling.sizes import _get_proper_dtype
from accel_compat.modeling.wrappers import is_peft_model
