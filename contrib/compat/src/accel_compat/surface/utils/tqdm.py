"""Progress bars."""

from accel_compat.state.output import tqdm
