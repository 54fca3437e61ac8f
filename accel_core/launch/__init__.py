"""Start workers, and report the first failure.

    accel launch, accel submit, notebook_launcher
      plan.plan            merge the config, refuse unknown names; the result is a Launch
      Launch.processes     count workers
      Launch.allocated     use the machines that a launcher's engine has given
      Launch.job           set the job's variables, of which ACCEL_LAUNCH_CONFIG holds the merged config
      launcher plugin      `torchrun` is launcher.py: torch's elastic_launch once per attempt
        addresses            address at which the nodes meet
        nodes                rendezvous of the nodes, which also report their failures there
        output               files for the output of workers, and whole lines on the terminal
        worker               runs the script, notes an uncaught exception in a file
        failure              finds the failure that made the other workers fail

No module imports torch before the launcher does, except to count devices that no plugin counts.
"""

from __future__ import annotations
