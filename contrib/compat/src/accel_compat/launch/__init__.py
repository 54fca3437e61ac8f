"""`accelerate launch` and the other commands, by `accel launch`."""
