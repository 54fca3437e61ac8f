"""Sizes, names, ties and files of a model's weights."""

from accel_compat.modeling.loading import *
from accel_compat.modeling.sizes import *
from accel_compat.modeling.sizes import _get_proper_dtype
from accel_compat.modeling.wrappers import is_peft_model
