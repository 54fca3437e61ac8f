"""Environment variables, installed libraries, and constants that programs read."""
