"""Starts real gateways and speaks to them as a stranger would: the package `websockets`, literal frames.

Nothing here knows the gateway's code; what it knows is docs/protocol.md.
"""
import asyncio
import contextlib
import functools
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
import uuid

import msgpack
import websockets

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("CHAT_GATEWAY", str(ROOT / "target/release/chat-gateway"))
STORE = os.environ.get("CHAT_TEST_STORE", "embedded")
CASSANDRA_NODES = os.environ["CASSANDRA_NODES"].split(",") if STORE == "cassandra" else []
PATIENCE = 20.0  # seconds until an awaited event is a failure; never a measure of speed


def cassandra(directory):
    """Settings for a keyspace that stands for a directory."""
    return {
        "store__kind": "cassandra",
        "store__cassandra__nodes": json.dumps(CASSANDRA_NODES),
        "store__cassandra__keyspace": keyspace_of(directory),
    }


@functools.cache
def cql():
    """A session of an independent driver."""
    from cassandra.cluster import Cluster, ExecutionProfile, EXEC_PROFILE_DEFAULT
    from cassandra.query import dict_factory

    profile = ExecutionProfile(row_factory=dict_factory, request_timeout=60, consistency_level=6)  # LOCAL_QUORUM
    hosts = [node.split(":")[0] for node in CASSANDRA_NODES]
    return Cluster(hosts, execution_profiles={EXEC_PROFILE_DEFAULT: profile}, connect_timeout=30).connect()


def clean(directory):
    """What a gateway's store left."""
    shutil.rmtree(directory, ignore_errors=True)
    if keyspace := keyspaces.pop(str(directory), None):
        tables = cql().execute("SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", [keyspace])
        for row in tables:
            if row["table_name"] != "schema_state":
                cql().execute(f"TRUNCATE {keyspace}.{row['table_name']}")
        empty_keyspaces.append(keyspace)


keyspaces = {}  # by directory
empty_keyspaces = []  # to create one takes a cluster ten times as long as to empty it


def keyspace_of(directory):
    if str(directory) not in keyspaces:
        keyspaces[str(directory)] = empty_keyspaces.pop() if empty_keyspaces else new_keyspace()
    return keyspaces[str(directory)]


def new_keyspace():
    return "test_" + uuid.uuid4().hex


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

    def env(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith("CHAT__")}
        env.update({f"CHAT__{k.upper()}": str(v) for k, v in self.settings.items()})
        return env

    def start(self):
        os.makedirs(self.directory, exist_ok=True)
        self.log_path = os.path.join(self.directory, f"gateway-{time.monotonic_ns()}.log")
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([BINARY, *self.arguments], env=self.env(), stderr=log, stdout=log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for line in self.log():
                if line.get("message") == "ready":
                    self.client = line["clients"]
                    self.internal = line["internal"]
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        raise AssertionError("the gateway did not start:\n" + open(self.log_path).read())

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
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def close(self):
        if self.process and self.process.poll() is None:
            self.kill()
        text = open(self.log_path).read()
        assert "panicked" not in text, text

    def command(self, *arguments, check=True):
        done = subprocess.run([BINARY, *arguments], env=self.env(), capture_output=True, text=True, timeout=600)
        if check:
            assert done.returncode == 0, done.stderr
        return done

    def token(self, user, *arguments):
        return self.command("token", user, *arguments).stdout.strip()

    def dev_token(self, user):
        """As `token`, without starting a process each time."""
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
        """A WebSocket without `connect`."""
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
        """A connected client."""
        client = await self.open(codec)
        await client.connect(user, **fields)
        return client


class Refused(AssertionError):
    def __init__(self, error):
        super().__init__(f"{error['code']}: {error['message']}")
        self.code = error["code"]
        self.error = error


class Client:
    def __init__(self, gateway, socket, codec):
        self.gateway, self.socket, self.codec = gateway, socket, codec
        self.ids = itertools.count(1)
        self.replies = {}
        self.events = []
        self.wake = asyncio.Event()
        self.reader = asyncio.create_task(self.read())

    async def read(self):
        try:
            async for raw in self.socket:
                frame = self.decode(raw)
                if "id" in frame:
                    waiting = self.replies.get(frame["id"])
                    assert waiting is not None, f"a reply nobody asked for: {frame}"
                    assert not waiting.done(), f"a second reply: {frame}"
                    waiting.set_result(frame)
                else:
                    self.events.append(frame)
                    self.wake.set()
        except websockets.ConnectionClosed:
            pass
        finally:
            for waiting in self.replies.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError("closed"))
            self.wake.set()

    def decode(self, raw):
        if self.codec == "json":
            assert isinstance(raw, str)
            return json.loads(raw)
        assert isinstance(raw, bytes)
        return readable(msgpack.unpackb(raw, strict_map_key=False))

    async def send_raw(self, raw):
        await self.socket.send(raw)

    async def post(self, **frame):
        """Sends a frame, in this client's encoding."""
        raw = json.dumps(frame) if self.codec == "json" else msgpack.packb(frame)
        await self.socket.send(raw)

    async def begin(self, type, **fields):
        """Sends a request; returns the future of its reply."""
        id = next(self.ids)
        reply = self.replies[id] = asyncio.get_running_loop().create_future()
        await self.post(type=type, id=id, **fields)
        return reply

    async def ask(self, type, **fields):
        """Sends a request and returns its reply, or raises Refused."""
        reply = await asyncio.wait_for(await self.begin(type, **fields), PATIENCE)
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
        """Waits for an event and takes it."""

        async def wait():
            while True:
                for i, event in enumerate(self.events):
                    if event["type"] == type and which(event):
                        return self.events.pop(i)
                self.wake.clear()
                if self.reader.done():
                    raise ConnectionError(f"closed while waiting for {type}")
                await self.wake.wait()

        try:
            return await asyncio.wait_for(wait(), PATIENCE)
        except TimeoutError:
            raise AssertionError(f"no {type}; there are {self.events}") from None

    async def message(self, conversation=None, body=None):
        return await self.event(
            "message",
            lambda e: conversation in (None, e["conversation"]) and body in (None, e["body"]),
        )

    async def quiet(self):
        """After a round trip everything that was published before has come."""
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
        """The whole log, page by page."""
        messages, after = [], 0
        while True:
            page = await self.history(conversation, after=after, limit=200)
            messages += page["messages"]
            if not page["messages"] or messages[-1]["seq"] >= page["head"]:
                return messages
            after = messages[-1]["seq"]

    async def closed(self):
        """Waits for the end; the close code."""
        await asyncio.wait_for(self.socket.wait_closed(), PATIENCE)
        return self.socket.close_code

    async def close(self):
        await self.socket.close()
        await self.reader


def readable(value):
    """MessagePack's 16-byte ids as text, so that one test serves both encodings."""
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
    """Waits until an awaited value is true; for what no event announces."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = await check()
        if value:
            return value
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.02)
