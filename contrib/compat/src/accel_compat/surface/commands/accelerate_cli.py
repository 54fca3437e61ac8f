"""The script `accelerate`."""

from accel_compat.launch.commands import accelerate as main

if __name__ == "__main__":
    main()
