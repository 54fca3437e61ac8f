"""Where workers meet: ports, addresses, other nodes, and tasks that a scheduler started."""

from __future__ import annotations

import os
import socket
import sys
import time
from threading import Thread

import pytest
from torch.distributed.elastic.rendezvous import RendezvousError

from accel_core import Job, LaunchError
from accel_core.launch import addresses, launcher, nodes
from accel_core.launch.launcher import TorchrunLauncher

ADVICE = (
    "check --rendezvous (an address of node 0, a port that is free there), "
    "and that each node was started, with its own --node-rank"
)


def test_a_port_in_use_is_refused_before_a_worker_starts():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = Job(argv=("no-such-command",), rendezvous=f"127.0.0.1:{port}")

        with pytest.raises(LaunchError) as caught:
            TorchrunLauncher().launch(job)

    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"node 0 of 1 could not meet the others at 127.0.0.1:{port}: ")
    assert "address already in use" in first
    assert others == [ADVICE]


@pytest.mark.parametrize("endpoint", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:http"])
def test_a_place_without_a_port_is_refused(endpoint):
    with pytest.raises(LaunchError, match="is not HOST:PORT"):
        TorchrunLauncher().launch(Job(argv=("x",), nodes=2, rendezvous=endpoint))


def test_a_node_that_finds_nobody_says_what_each_node_needs(monkeypatch):
    monkeypatch.setattr(launcher, "RENDEZVOUS_SECONDS", 1)

    with pytest.raises(LaunchError) as caught:
        TorchrunLauncher().launch(Job(argv=("x",), nodes=2, node_rank=1, rendezvous="127.0.0.1:1"))

    first, *others = str(caught.value).splitlines()
    assert first.startswith("node 1 of 2 could not meet the others at 127.0.0.1:1: ")
    assert others == [ADVICE]


def test_a_name_that_no_machine_has_is_an_error_when_the_time_is_over():
    with pytest.raises(LaunchError, match="could not meet the others at no-such-host.invalid:29500: .Errno"):
        addresses.wait_for_node_0(Job(argv=(), nodes=2), ("no-such-host.invalid", 29500), 0)


def test_a_name_that_is_not_known_yet_is_waited_for_and_told(monkeypatch, capfd):
    """As that of a pod, which has one when it has started."""
    monkeypatch.setattr(addresses, "FIRST_NOTICE", 0.2)
    known = socket.getaddrinfo
    begun = time.monotonic()

    def unknown_at_first(host, *more):
        if time.monotonic() < begun + 1.5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", *more)

    monkeypatch.setattr(socket, "getaddrinfo", unknown_at_first)

    addresses.wait_for_node_0(Job(argv=(), nodes=2), ("train-0.train", 29500), 60)
    assert "node 0 waits for its own name, train-0.train, to be known" in capfd.readouterr().err


def test_an_address_in_brackets_is_the_address():
    place = addresses.rendezvous_address(Job(argv=(), nodes=2, rendezvous="[::1]:29500"))

    assert place == ("::1", 29500)


def node_in_thread(number, count, port, told):
    try:
        job = Job(argv=(), nodes=count, node_rank=number)
        nodes.Nodes(job, "127.0.0.1", port, 5, lambda: None).next_rendezvous()
    except (LaunchError, RuntimeError, RendezvousError) as error:  # the last: node 0 has ended
        told.append(str(error))


@pytest.mark.full
def test_a_node_that_waits_says_for_whom_and_where(monkeypatch, capfd):
    monkeypatch.setattr(addresses, "FIRST_NOTICE", 0.2)
    told = []

    node_in_thread(0, 2, 0, told)

    assert "node 0 of 2 waits for node 1 at 127.0.0.1:" in capfd.readouterr().err
    assert told[0].startswith("node 0 of 2 waited 5 s at 127.0.0.1:")
    assert " for node 1\n" in told[0]


@pytest.mark.full
def test_two_nodes_of_one_number_are_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = []
    threads = [Thread(target=node_in_thread, args=(number, 3, port, told)) for number in (0, 1, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.5)  # node 0 serves, and the first node 1 is there before the second
    for thread in threads:
        thread.join()

    assert "two launchers at 127.0.0.1" in told[0]
    assert "say that they are node 1 of 3" in told[0]
    assert told[0].endswith("rejoin only if all nodes were started with --min-nodes")


def test_cores_are_shared_out_unless_the_user_did(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with launcher._environment(Job(argv=(), processes_per_node=10_000), "127.0.0.1", 0):
        assert os.environ["OMP_NUM_THREADS"] == "1"

    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with launcher._environment(Job(argv=(), processes_per_node=10_000), "127.0.0.1", 0):
        assert os.environ["OMP_NUM_THREADS"] == "5"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_the_interface_towards_an_address_is_found():
    """Else gloo would take that of the host's own name, often a loopback."""
    assert addresses.interface_towards("127.0.0.1", 29500) == "lo"
