"""Start workers, and report the failure of one.

    accel launch, accel submit, notebook_launcher
      plan.plan            merge the config, refuse unknown names; the result is a Launch
      Launch.processes     count workers
      Launch.allocated     take the machines that a launcher's engine has given
      Launch.job           write the merged config to a file, set the job's variables
      launcher plugin      `torchrun` is launcher.py; it runs until the workers end
        rendezvous           address at which the nodes meet
          meeting              port of node 0, agreed on by the name of an engine's job
        agent                torch's agent on each node; failures are announced to the other nodes
          worker               runs the script, notes an uncaught exception in a file
        failure              finds the failure that made the others fail, and raises it

Nothing imports torch before the agent does, apart from counting devices that no plugin counts.
"""

from __future__ import annotations
