"""Start workers, and report the failure of one.

    accel launch, notebook_launcher
      plan.plan            merge the config, refuse unknown names; the result is a Launch
      Launch.processes     count workers
      Launch.job           write the merged config to a file, set the job's variables
      launcher plugin      `torchrun` is launcher.py; it runs until the workers end
        rendezvous           address at which the nodes meet
        agent                torch's agent on each node; failures are announced to the other nodes
          worker               runs the script, notes an uncaught exception in a file
        failure              finds the failure that made the others fail, and raises it

Nothing imports torch before the agent does, apart from counting devices that no plugin counts.
"""

from __future__ import annotations
