"""What Accelerate's `test_utils` gives to tests of other libraries."""
