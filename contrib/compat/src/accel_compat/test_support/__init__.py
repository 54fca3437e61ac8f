"""Helpers of Accelerate's `test_utils`, for the tests of other libraries."""
