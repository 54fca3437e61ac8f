"""Commands of Accelerate."""
