"""Models in stages on several processes, for inference."""

from accel_compat.big_models.pipelines import *
