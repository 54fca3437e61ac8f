"""Models: made on a device, loaded, measured, unwrapped."""
