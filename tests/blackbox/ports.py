"""Free ports for servers that are started later."""
import contextlib
import itertools
import os
import random
import socket

PROCESSES_MAX, PORTS = 7, 1_250  # of tests over one store; of each. The tests of the SDK have those from 29,500.


def ports_of(worker, store):
    """The ports of one process with tests: what one has found free, another one must not take before it is used."""
    number = int(worker.removeprefix("gw") or 0)
    assert number < PROCESSES_MAX, f"at most {PROCESSES_MAX} processes have ports of their own"
    first = 12_000 + PORTS * (number + (PROCESSES_MAX if store == "cassandra" else 0))
    return range(first, first + PORTS)


OWN_PORTS = ports_of(os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("CHAT_TEST_STORE", "embedded"))
# Each is given again only after all others.
in_turn = itertools.cycle(random.sample(OWN_PORTS, PORTS))


def free_port():
    """A free port below the ephemeral range, so that no connection takes it while its gateway restarts."""
    for port in in_turn:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
