"""Hosts in network namespaces: nothing is left of them."""

from __future__ import annotations

import sys
from pathlib import Path

ADDRESSES = {"left": "10.78.0.9"}


def test_hosts_of_a_process_that_was_killed_are_removed_when_others_are_made(make_hosts, run_command):
    source = f"""
import os, signal, subprocess
from subprocess import DEVNULL
from accel_testing.hosts import make_hosts
with make_hosts({ADDRESSES}) as hosts:
    print(os.getpid(), flush=True)
    subprocess.Popen(hosts["left"].command("sleep", "600"), stdout=DEVNULL, stderr=DEVNULL)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = run_command([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    namespace = Path("/run/netns", f"accel-{killed.stdout.strip()}-left")
    assert namespace.exists()

    with make_hosts(ADDRESSES):
        assert not namespace.exists()
