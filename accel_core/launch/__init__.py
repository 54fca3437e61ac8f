"""Start workers, and report the failure of one.

    accel launch, accel submit, notebook_launcher
      plan.plan            merge the config, refuse unknown names; the result is a Launch
      Launch.processes     count workers
      Launch.allocated     take the machines that a launcher's engine has given
      Launch.job           set the job's variables; one of them holds the merged config
      launcher plugin      `torchrun` is launcher.py: torch's elastic_launch once per attempt
        addresses            address at which the nodes meet
        nodes                rendezvous of the nodes, which hear there of each other's failures
        output               files for what workers write, and whole lines on the terminal
        worker               runs the script, notes an uncaught exception in a file
        failure              finds the failure that made the others fail

Nothing imports torch before the launcher does, apart from counting devices that no plugin counts.
"""

from __future__ import annotations
