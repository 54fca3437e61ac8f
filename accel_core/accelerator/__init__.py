"""What `Accelerator` is put together from: a topic a file, each method a line or a few over the run."""
