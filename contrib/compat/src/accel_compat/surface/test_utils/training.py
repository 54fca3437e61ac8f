"""The smallest model, and its data."""

from accel_compat.test_support.cases import RegressionDataset, RegressionModel
