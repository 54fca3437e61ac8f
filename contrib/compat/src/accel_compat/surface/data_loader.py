"""Dataloaders and samplers made by a program."""

from accel_compat.loaders.samplers import *
from accel_compat.loaders.sharing import *
from accel_compat.loaders.standalone import *
