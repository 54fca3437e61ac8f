"""PartialState, AcceleratorState and GradientState."""

from accel_compat.state.gradient_state import *
from accel_compat.state.states import *
