"""How a gateway meets Cassandra: its tables, settings that do not fit the cluster, a cluster that is not there, TLS."""
import json
import signal
import subprocess
import time

import pytest
from cassandra import OperationTimedOut, ReadTimeout, Unavailable, WriteTimeout

from certificates import certificate
from ports import free_port
from support import BINARY, PATIENCE, Gateway, OwnNodes, cql, new_keyspace
from test_cassandra import ready

pytestmark = pytest.mark.cassandra


def insisted(session, statement):
    """Runs a statement that may be repeated until the nodes, which other tests may just have killed, carry it out."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return session.execute(statement).one()
        except (OperationTimedOut, ReadTimeout, Unavailable, WriteTimeout):
            assert time.monotonic() < deadline, statement


def lose_the_lock(keyspace):
    """Takes the lock from the process that creates the tables, which must stop, and gives it back after a while."""
    session, deadline = cql(), time.monotonic() + 3 * PATIENCE
    tables = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s"
    lock = f"{keyspace}.schema_state"
    while len(list(session.execute(tables, [keyspace]))) < 3:
        assert time.monotonic() < deadline, "no table was created"
        time.sleep(0.02)
    taken = insisted(session, f"UPDATE {lock} SET holder = uuid() WHERE name = 'lock' IF EXISTS")
    assert taken["[applied]"]
    created = len(list(session.execute(tables, [keyspace])))
    time.sleep(5)
    # One may have been on its way.
    assert len(list(session.execute(tables, [keyspace]))) <= created + 1 < 25
    insisted(session, f"DELETE FROM {lock} WHERE name = 'lock' IF EXISTS")


def test_the_schema_is_created_once_and_can_be_printed(start, tmp_path):
    keyspace = new_keyspace()
    # Nodes that other tests have just killed answer slowly.
    gateway = Gateway(str(tmp_path), store__cassandra__keyspace=keyspace, store__cassandra__timeout_ms=10000)
    environment = gateway.env()
    command = [BINARY, "schema", "apply"]
    at_once = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lose_the_lock(keyspace)
    said = sorted(p.communicate(timeout=3 * PATIENCE)[0] for p in at_once)
    assert all(p.returncode == 0 for p in at_once), said
    assert sum("now has version" in text for text in said) == 1 and sum("had already" in text for text in said) == 2, said
    columns = "SELECT table_name, column_name, type, kind FROM system_schema.columns WHERE keyspace_name = %s"
    session = cql()
    applied = {tuple(r.values()) for r in session.execute(columns, [keyspace])} - {
        tuple(r.values()) for r in session.execute(columns + " AND table_name = 'schema_state'", [keyspace])}
    options = session.execute(
        "SELECT table_name, read_repair, compaction FROM system_schema.tables WHERE keyspace_name = %s", [keyspace])
    options = {row["table_name"]: row for row in options}
    for log in ("messages", "sends"):
        assert options[log]["read_repair"] == "BLOCKING"
    # Only these rows never change, and have the time as timestamp.
    assert [name for name, o in options.items() if "TimeWindow" in str(o["compaction"])] == ["sends"]
    # The printed schema can be applied with another client.
    other = keyspace + "b"
    gateway.settings["store__cassandra__keyspace"] = other
    printed = gateway.command("schema", "print").stdout
    session.execute("USE system")
    lines = [line.split("--")[0] for line in printed.splitlines()]
    for statement in "\n".join(lines).split(";"):
        if statement.strip():
            session.execute(statement)
    assert {tuple(r.values()) for r in session.execute(columns, [other])} == applied


def test_settings_that_do_not_fit_the_cluster_are_refused(tmp_path):
    """A gateway that starts with them exits and says why: in another datacenter it would decide alone."""
    keyspace = new_keyspace()
    session = cql()

    def refused_with(why, **settings):
        gateway = Gateway(str(tmp_path), store__cassandra__keyspace=keyspace, **settings)
        for command in ((), ("schema", "apply")):
            done = gateway.command(*command, check=False)
            assert done.returncode == 1 and why in done.stderr, done.stderr

    refused_with("store.cassandra.datacenter: the cluster has no north, only datacenter1", store__cassandra__datacenter="north")
    refused_with("store.cassandra.replication: the cluster has no datacenter north", store__cassandra__replication="{north=3}")
    for replication, why in (
        ("{'class': 'SimpleStrategy', 'replication_factor': 3}", "has the replication class org.apache.cassandra.locator.SimpleStrategy"),
        ("{'class': 'NetworkTopologyStrategy', 'datacenter1': 1}", "has 1 copies in datacenter1, and store.cassandra.replication says 3"),
    ):
        session.execute(f"CREATE KEYSPACE {keyspace} WITH replication = {replication}")
        refused_with(why)
        session.execute(f"DROP KEYSPACE {keyspace}")


def test_a_gateway_waits_for_an_unreachable_cluster(tmp_path):
    internal = f"127.0.0.1:{free_port()}"
    gateway = Gateway(str(tmp_path), internal__listen=internal, store__cassandra__nodes='["127.66.66.66:9042"]')
    log = tmp_path / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen([BINARY], env=gateway.env(), stdout=out, stderr=out)
    try:
        gateway.internal = internal
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                assert ready(gateway) == 503
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        body = subprocess.run([BINARY, "health"], env=gateway.env(), capture_output=True, text=True)
        assert body.returncode == 1 and "starting" in body.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        process.kill()
    assert "the cluster is not ready" in log.read_text()


@pytest.mark.parametrize("command", [("cluster", "status"), ("cluster", "raise-ring"), ("store", "check", "0199c0de-0000-4000-8000-000000000001")])
def test_a_command_says_what_it_waits_for(tmp_path, command):
    gateway = Gateway(str(tmp_path), store__cassandra__nodes='["127.66.66.66:9042"]')
    process = subprocess.Popen([BINARY, *command], env=gateway.env(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert "the cluster is not ready; trying again" in process.stderr.readline()
    finally:
        process.kill()
        process.wait()


@pytest.mark.xdist_group("own nodes")
@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_and_a_password(tmp_path, mutual):
    """Starts a node that accepts only TLS and a password, or with `mutual` also only those who have a certificate."""
    known, other = [[str(path) for path in certificate(tmp_path / name, name)] for name in ("known", "other")]
    with OwnNodes(tmp_path / "secure", 1, CASSANDRA_SECURE="1", **({"CASSANDRA_CLIENTS": known[0]} if mutual else {})) as nodes:
        secure = {
            "store__cassandra__nodes": json.dumps([f"{nodes.host(1)}:9042"]),
            "store__cassandra__replication": "{replication_factor=1}",
            "store__cassandra__username": "cassandra",
            "store__cassandra__password": "cassandra",
            "store__cassandra__tls_authority_file": str(nodes.home / "node1/conf/node.pem"),
        }

        def of_client(files):
            return dict(zip(("store__cassandra__tls_certificate_file", "store__cassandra__tls_key_file"), files))

        if mutual:
            for files in ([], other):
                refused = Gateway(str(tmp_path / "data"), **secure, **of_client(files)).command("schema", "apply", check=False)
                assert refused.returncode != 0, refused.stdout
            secure |= of_client(known)
        gateway = Gateway(str(tmp_path / "data"), **secure)
        try:
            for missing, why in (("password", "together with store.cassandra.password"), ("username", "together with store.cassandra.password"), ("tls_authority_file", "")):
                settings = {k: v for k, v in secure.items() if not k.endswith(missing)}
                refused = Gateway(str(tmp_path / "data"), **settings).command("schema", "apply", check=False)
                assert refused.returncode != 0 and why in refused.stderr, refused.stderr
            wrong = Gateway(str(tmp_path / "data"), **{**secure, "store__cassandra__password": "guessed"})
            assert wrong.command("schema", "apply", check=False).returncode != 0
            shown = gateway.command("config", "show").stdout
            assert 'store.cassandra.password = "***"' in shown
            gateway.start()
            alice = await gateway.connect("alice")
            dm = await alice.create("dm", "bob")
            assert (await alice.send(dm, "over TLS"))["seq"] == 1
            await alice.close()
            assert gateway.stop() == 0
        finally:
            gateway.close()
