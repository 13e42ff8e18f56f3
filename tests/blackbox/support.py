"""Starts real gateways and talks to them with the package `websockets` and literal frames.

This module knows docs/protocol.md and nothing of the gateway's code.
"""
import asyncio
import concurrent.futures
import contextlib
import fcntl
import functools
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
import uuid

import jwt
import msgpack
import websockets

from ports import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("CHAT_GATEWAY", str(ROOT / "target/release/chat-gateway"))
STORE = os.environ.get("CHAT_TEST_STORE", "embedded")
CASSANDRA_NODES = os.environ["CASSANDRA_NODES"].split(",") if STORE == "cassandra" else []
PATIENCE = 60.0  # seconds until an awaited event is a failure; never a measure of speed
# Settings for tests that make more requests than the default rates allow.
UNLIMITED = {f"limits__{name}": 1 << 30 for name in ("requests_per_second", "requests_burst", "request_bytes_per_second", "request_bytes_burst")}


def cassandra(directory):
    """Settings of a gateway whose data is in the keyspace of this directory."""
    return {
        "store__kind": "cassandra",
        "store__cassandra__nodes": json.dumps(CASSANDRA_NODES),
        "store__cassandra__keyspace": keyspace_of(directory),
    }


@functools.cache
def cql():
    """A session of the Python driver, which is independent of the gateway's."""
    from cassandra.cluster import Cluster, ExecutionProfile, EXEC_PROFILE_DEFAULT
    from cassandra.query import dict_factory

    profile = ExecutionProfile(row_factory=dict_factory, request_timeout=60, consistency_level=6)  # LOCAL_QUORUM
    hosts = [node.split(":")[0] for node in CASSANDRA_NODES]
    # The driver would read all keyspaces again after each change of the schema.
    return Cluster(hosts, execution_profiles={EXEC_PROFILE_DEFAULT: profile}, connect_timeout=30, schema_metadata_enabled=False).connect()


def clean(directory):
    """Deletes the data of a gateway and frees its keyspace for another test."""
    shutil.rmtree(directory, ignore_errors=True)
    keyspace = keyspaces.pop(str(directory), None)
    if keyspace and keyspace not in abandoned_keyspaces:
        free_keyspaces(lambda free: free.append(keyspace))


keyspaces = {}  # directory -> keyspace
abandoned_keyspaces = set()


def free_keyspaces(change):
    """Changes the list of keyspaces that no test of any process uses, and returns what the change returns. Creating a keyspace takes
    three nodes 20 s of CPU, ten times as long as emptying one."""
    path = pathlib.Path(os.environ.get("CASSANDRA_HOME_DIR", os.path.expanduser("~/.cache/local-cassandra")), "free-keyspaces")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        free = file.read().split()
        result = change(free)
        file.truncate(0)
        file.write("\n".join(free))
    return result


def keyspace_of(directory):
    if str(directory) not in keyspaces:
        # A slow replica can apply old writes even after a TRUNCATE, so the keyspace unused for longest is the safest.
        reused = free_keyspaces(lambda free: free.pop(0) if len(free) > 2 else None)
        keyspaces[str(directory)] = emptied(reused) if reused else new_keyspace()
    return keyspaces[str(directory)]


def emptied(keyspace):
    from cassandra.query import ConsistencyLevel, SimpleStatement

    tables = [row["table_name"] for row in cql().execute("SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", [keyspace])]

    def each(statement, tables):
        """Executes a statement for all tables at once."""
        asked = [(table, cql().execute_async(SimpleStatement(statement.format(f"{keyspace}.{table}"), consistency_level=ConsistencyLevel.ALL)))
                 for table in tables if table != "schema_state"]
        return [(table, answer.result()) for table, answer in asked]

    each("TRUNCATE {}", [table for table, rows in each("SELECT * FROM {} LIMIT 1", tables) if rows.one()])
    return keyspace


def abandon_keyspaces():
    """Excludes the present keyspaces from reuse: nodes will miss writes, and hints may apply them after a TRUNCATE."""
    abandoned_keyspaces.update(keyspaces.values())


def new_keyspace():
    """Name of a new keyspace. It is never dropped: a drop can break the schema of a node that is catching up (5.0)."""
    return "test_" + uuid.uuid4().hex


class OwnNodes:
    """Nodes of Cassandra that only one test uses, on loopback."""

    def __init__(self, home, count, **environment):
        shared = os.environ.get("CASSANDRA_HOME_DIR", os.path.expanduser("~/.cache/local-cassandra"))
        self.home, self.members, self.keyspace = pathlib.Path(home), list(range(1, count + 1)), new_keyspace()
        self.net = f"127.{random.randrange(64, 127)}.{random.randrange(256)}"
        self.environment = {"CASSANDRA_LIB": f"{shared}/lib", **os.environ, "CASSANDRA_HOME_DIR": str(home),
                            "CASSANDRA_NET": self.net, **environment}

    def __enter__(self):
        try:
            self.run("start", len(self.members))
        except BaseException:
            self.run("clean")
            raise
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.run("warnings")
        finally:
            self.run("clean")

    def run(self, *command, **environment):
        """Runs a command of tests/cassandra/cassandra."""
        done = subprocess.run([str(ROOT / "tests/cassandra/cassandra"), *map(str, command)], env={**self.environment, **environment},
                              capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise AssertionError(f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    def tool(self, node, *command):
        """Runs `nodetool` on a node."""
        return self.run("nodetool", node, *command)

    def host(self, node):
        return f"{self.net}.{node}"

    def lose(self, node):
        """Kills a node, deletes its disk, and waits until no other node sees it as up."""
        self.run("kill", node)
        shutil.rmtree(self.home / f"node{node}/data")
        last, deadline = re.compile(rf"/{re.escape(self.host(node))}:7000\S* is now (UP|DOWN)"), time.monotonic() + 2 * PATIENCE
        self.members.remove(node)
        for other in self.members:
            log = self.home / f"node{other}/log/system.log"
            while (last.findall(log.read_text()) or ["UP"])[-1] != "DOWN":
                assert time.monotonic() < deadline, f"node {other} sees the lost node as up"
                time.sleep(0.1)

    def replace(self, lost, new):
        """Starts a new node in place of a lost one."""
        options = os.environ.get("CASSANDRA_JVM_OPTIONS", "")
        self.run("revive", new, CASSANDRA_JVM_OPTIONS=f"{options} -Dcassandra.replace_address_first_boot={self.host(lost)}")
        self.members.append(new)

    def restore(self, node, snapshot):
        """Puts the files of a snapshot in the place of those of the keyspace. The node is stopped."""
        for table in (self.home / f"node{node}/data/sstables" / self.keyspace).iterdir():
            for file in table.iterdir():
                if file.is_file():
                    file.unlink()
            kept = table / "snapshots" / snapshot
            for file in kept.iterdir() if kept.exists() else ():
                os.link(file, table / file.name)

    def execute(self, node, statement):
        """Runs a statement on this node only, and is content with its answer."""
        from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
        from cassandra.policies import WhiteListRoundRobinPolicy

        hosts = [self.host(node)]
        profile = ExecutionProfile(WhiteListRoundRobinPolicy(hosts), request_timeout=60, consistency_level=10)  # LOCAL_ONE
        with Cluster(hosts, execution_profiles={EXEC_PROFILE_DEFAULT: profile}, connect_timeout=30) as cluster:
            return list(cluster.connect().execute(statement))


async def within(awaited, seconds):
    """Awaits for at most this long. `asyncio.wait_for` of Python 3.11 swallows a cancellation that comes together with the result, so a
    task that asks in a loop might never end."""
    async with asyncio.timeout(seconds):
        return await awaited


class Gateway:
    """One gateway process over one data directory."""

    def __init__(self, data=None, config=None, **settings):
        self.directory = data or tempfile.mkdtemp(prefix="chat-test-")
        self.arguments = ["--config", str(config)] if config else []
        self.settings = {
            "client__listen": "127.0.0.1:0",
            "internal__listen": "127.0.0.1:0",
            "store__embedded__path": self.directory,
            "log__format": "json",
            "drain__spread_ms": "100",
            **(cassandra(self.directory) if STORE == "cassandra" else {}),
            **settings,
        }
        self.process = None
        self.log_paths = []  # of all starts
        self.prefix = []  # command to start the gateway with, such as `ip netns exec`

    def env(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("CHAT__")}
        env.update({f"CHAT__{k.upper()}": str(v) for k, v in self.settings.items()})
        return env

    def start(self):
        os.makedirs(self.directory, exist_ok=True)
        self.log_path = os.path.join(self.directory, f"gateway-{time.monotonic_ns()}.log")
        self.log_paths.append(self.log_path)
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([*self.prefix, BINARY, *self.arguments], env=self.env(), stderr=log, stdout=log)
        deadline = time.monotonic() + 3 * PATIENCE  # Nodes that agree on each of 25 new tables need a while.
        while time.monotonic() < deadline:
            for line in self.log():
                if line.get("message") == "ready":
                    self.client = line["clients"]
                    self.internal = line["internal"]
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError("the gateway did not become ready; its log:\n" + open(self.log_path).read())

    def log(self):
        lines = []
        for line in open(self.log_path):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """Stops the gateway with SIGTERM and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def close(self):
        if not self.process:
            return
        if self.process.poll() is None:
            self.kill()
        for path in self.log_paths:
            text = open(path).read() if os.path.exists(path) else ""
            assert "panicked" not in text, text

    def command(self, *arguments, check=True):
        done = subprocess.run([BINARY, *arguments], env=self.env(), capture_output=True, text=True, timeout=600)
        if check:
            assert done.returncode == 0, done.stderr
        return done

    def token(self, user, *arguments):
        return self.command("token", user, *arguments).stdout.strip()

    def dev_token(self, user):
        """Returns a development token over HTTP, which is faster than `token`: no process is started."""
        request = urllib.request.Request(
            f"http://{self.client}/v1/tokens",
            data=json.dumps({"user": user}).encode(),
            headers={"content-type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request, timeout=PATIENCE))["token"]

    def metrics(self):
        text = urllib.request.urlopen(f"http://{self.internal}/metrics", timeout=PATIENCE).read().decode()
        values = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values

    async def open(self, codec="json", subprotocols="default", **options):
        """Opens a WebSocket without sending `connect`."""
        if subprotocols == "default":
            subprotocols = [f"chat.v1.{codec}"]
        socket = await websockets.connect(
            f"ws://{self.client}/v1/ws",
            subprotocols=subprotocols,
            max_size=None,
            compression=None,
            proxy=None,
            **options,
        )
        return Client(self, socket, codec)

    async def connect(self, user, codec="json", **fields):
        """Opens a WebSocket, sends `connect` as this user and returns the client."""
        client = await self.open(codec)
        await client.connect(user, **fields)
        return client


def member(host="127.0.0.1", **settings):
    """Settings of a gateway that is a member of a cluster."""
    address = f"{host}:{free_port()}"
    return {
        "cluster__enabled": "true",
        "cluster__listen": address,
        "cluster__advertise": address,
        "cluster__secret": "a secret that all gateways know, and nobody else",
        **settings,
    }


class Three(Gateway):
    """Three gateways on one store, used like one: each connection goes to the next gateway."""

    def __init__(self, data=None, config=None, **settings):
        super().__init__(data, config, **settings)
        # With the same directory, all of them accept the same development tokens.
        self.nodes = [Gateway(self.directory, config, **member(**settings)) for _ in range(3)]
        self.turn = itertools.cycle(self.nodes)

    def start(self):
        first = self.nodes[0].start()  # The first one creates the key of the development tokens.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.start(), self.nodes[1:]))
        self.client, self.internal, self.process, self.log_path = first.client, first.internal, first.process, first.log_path
        return self

    def close(self):
        with contextlib.ExitStack() as closing:  # closes all, even if one raises
            for node in self.nodes:
                closing.callback(node.close)

    def metrics(self):
        total = {}
        for node in self.nodes:
            for name, value in node.metrics().items():
                total[name] = total.get(name, 0) + value
        return total

    async def open(self, codec="json", subprotocols="default", **options):
        return await next(self.turn).open(codec, subprotocols, **options)


class Apart(Three):
    """Three gateways, each in a network namespace on the bridge CHAT_TEST_BRIDGE, so that any two can be cut off."""

    NOBODY = "02:00:00:00:00:99"  # a MAC address that no interface has

    def __init__(self, **settings):
        directory = tempfile.mkdtemp(prefix="chat-test-")
        # Development tokens work on loopback only.
        self.key = "a key for tests in network namespaces"
        config = pathlib.Path(directory, "gateway.toml")
        config.write_text(f'[[auth.keys]]\nalgorithm = "HS256"\nsecret = "{self.key}"\n')
        super().__init__(directory, config, **settings)
        self.stores = [node.split(":")[0] for node in CASSANDRA_NODES]
        net = self.stores[0].rsplit(".", 1)[0]
        self.bridge = os.environ["CHAT_TEST_BRIDGE"]
        self.hosts = [f"{net}.{11 + n}" for n in range(3)]
        self.spaces = [f"{self.bridge}-{n}" for n in range(3)]
        for node, host, space in zip(self.nodes, self.hosts, self.spaces):
            node.prefix = ["ip", "netns", "exec", space]
            node.settings |= member(host)
            node.settings |= {"client__listen": f"{host}:8080", "internal__listen": f"{host}:9090"}
            node.dev_token = self.dev_token

    def start(self):
        for n, (host, space) in enumerate(zip(self.hosts, self.spaces)):
            wire = f"{self.bridge}w{n}"
            ip("netns", "add", space)
            ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", wire, "master", self.bridge, "up")
            ip("-n", space, "addr", "add", f"{host}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        return super().start()

    def close(self):
        try:
            super().close()
        finally:
            for space in self.spaces:
                ip("netns", "del", space)

    def dev_token(self, user):
        return jwt.encode({"sub": user, "exp": time.time() + 3600}, self.key, algorithm="HS256")

    def cut(self, n, hosts):
        """Drops silently everything that gateway `n` sends to these hosts, until `mend`."""
        for host in hosts:
            ip("-n", self.spaces[n], "neigh", "replace", host, "lladdr", self.NOBODY, "nud", "permanent", "dev", "eth0")

    def mend(self, n):
        """Ends what `cut` began for gateway `n`."""
        ip("-n", self.spaces[n], "neigh", "flush", "nud", "permanent", "dev", "eth0")


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Refused(AssertionError):
    def __init__(self, error):
        super().__init__(f"{error['code']}: {error['message']}")
        self.code = error["code"]
        self.error = error


wrong_frames = []  # what readers found wrong. Whoever waits for a reply then sees a closed connection, which can be expected.


class Client:
    def __init__(self, gateway, socket, codec):
        self.gateway, self.socket, self.codec, self.user = gateway, socket, codec, None
        self.ids = itertools.count(1)
        self.replies = {}  # of the requests that are not answered
        self.places = set()
        self.events = []
        self.wake = asyncio.Event()
        self.reader = asyncio.create_task(self.read())

    async def read(self):
        try:
            async for raw in self.socket:
                frame = self.decode(raw)
                if "id" in frame:
                    waiting = self.replies.pop(frame["id"], None)
                    assert waiting is not None, f"a reply without a request, or a second one: {frame}"
                    if not waiting.done():  # Otherwise whoever asked has given up.
                        waiting.set_result(frame)
                elif self.is_new(frame):
                    self.events.append(frame)
                    self.wake.set()
        except websockets.ConnectionClosed:
            pass
        except Exception as wrong:
            wrong_frames.append(f"{self.user}: {wrong!r}")
            raise
        finally:
            for waiting in self.replies.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("closed"))
            self.wake.set()

    def is_new(self, event):
        """Whether the event is new. Clients ignore a message whose seq they have; a single gateway never repeats one."""
        if event["type"] != "message" or STORE != "cassandra":
            return True
        place = event["conversation"], event["seq"]
        known = place in self.places
        self.places.add(place)
        return not known

    def decode(self, raw):
        if self.codec == "json":
            assert isinstance(raw, str)
            return json.loads(raw)
        assert isinstance(raw, bytes)
        return readable(msgpack.unpackb(raw, strict_map_key=False))

    async def send_raw(self, raw):
        await self.socket.send(raw)

    async def post(self, **frame):
        """Sends a frame in this client's encoding."""
        raw = json.dumps(frame) if self.codec == "json" else msgpack.packb(frame)
        await self.socket.send(raw)

    async def begin(self, type, **fields):
        """Sends a request and returns the future of its reply."""
        id = next(self.ids)
        reply = self.replies[id] = asyncio.get_running_loop().create_future()
        await self.post(type=type, id=id, **fields)
        return reply

    async def ask(self, type, **fields):
        """Sends a request and returns its reply. Raises Refused if it is an error."""
        reply = await within(await self.begin(type, **fields), PATIENCE)
        if reply["type"] == "error":
            raise Refused(reply)
        return reply

    async def connect(self, user, token=None, **fields):
        self.user = user
        self.hello = await self.ask("connect", token=token or self.gateway.dev_token(user), **fields)
        assert self.hello["type"] == "connected"
        return self.hello

    async def create(self, kind, *participants, **fields):
        reply = await self.ask("create", kind=kind, participants=list(participants), **fields)
        return reply["conversation"]

    async def send(self, conversation, body, client_id=None, **fields):
        client_id = client_id or str(uuid.uuid4())
        return await self.ask("send", conversation=conversation, client_id=client_id, body=body, **fields)

    async def event(self, type, which=lambda event: True):
        """Waits for an event and removes it from `events`."""

        async def wait():
            while True:
                for i, event in enumerate(self.events):
                    if event["type"] == type and which(event):
                        return self.events.pop(i)
                self.wake.clear()
                if self.reader.done():
                    raise ConnectionError(f"the connection closed while waiting for {type}")
                await self.wake.wait()

        try:
            return await within(wait(), PATIENCE)
        except TimeoutError:
            raise AssertionError(f"no {type} came within {PATIENCE} s; events: {self.events}") from None

    async def message(self, conversation=None, body=None):
        return await self.event(
            "message",
            lambda e: conversation in (None, e["conversation"]) and body in (None, e["body"]),
        )

    async def quiet(self):
        """Returns the events so far, after a round trip: everything published before it has arrived."""
        await self.ask("ping")
        return self.events

    async def inbox(self, conversation=None, **fields):
        items = (await self.ask("inbox", **fields))["items"]
        if conversation is None:
            return items
        return next((i for i in items if i["conversation"] == conversation), None)

    async def history(self, conversation, **fields):
        return await self.ask("history", conversation=conversation, **fields)

    async def everything(self, conversation):
        """Reads the whole log of a conversation, page by page."""
        messages, after = [], 0
        while True:
            page = await self.history(conversation, after=after, limit=200)
            messages += page["messages"]
            if not page["messages"] or messages[-1]["seq"] >= page["head"]:
                return messages
            after = messages[-1]["seq"]

    async def closed(self):
        """Waits until the connection closes and returns its close code."""
        await within(self.socket.wait_closed(), PATIENCE)
        return self.socket.close_code

    async def close(self):
        await self.socket.close()
        await self.reader


def readable(value):
    """Converts MessagePack's 16-byte ids to text, so that a test can compare both encodings alike."""
    if isinstance(value, dict):
        return {readable(k): readable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [readable(v) for v in value]
    if isinstance(value, bytes) and len(value) == 16:
        return str(uuid.UUID(bytes=value))
    return value


def uuid4():
    return str(uuid.uuid4())


async def eventually(check):
    """Calls `check` until it returns a true value, and returns that. For changes that no event announces."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = await check()
        if value:
            return value
        assert time.monotonic() < deadline, f"not true within {PATIENCE} s"
        await asyncio.sleep(0.02)
