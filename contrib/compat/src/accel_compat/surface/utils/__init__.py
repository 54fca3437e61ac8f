"""`accelerate.utils`."""

from accel_compat.environment.libraries import is_ipex_available

# This also binds the submodule of that name, which would otherwise take the function's place.
from .tqdm import tqdm
