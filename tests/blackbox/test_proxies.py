"""nginx and Caddy in front of a gateway, configured as docs/deployment.md prints it. NGINX and CADDY name the programs."""
import asyncio
import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import ssl
import subprocess

import httpx
import jwt
import pytest
import websockets

from certificates import certificate
from files import TUS
from ports import free_port
from support import PATIENCE, ROOT, eventually, uuid4

NAME, SECRET = "chat.example.org", "a secret of more than thirty-two bytes"
SIZE = 9 << 20
# A broken upload has come at least so far if each byte is passed on.
BROKEN_AT, COME = 6 << 20, 3 << 20


def printed(language, part=""):
    """A block of docs/deployment.md."""
    text = (ROOT / "docs/deployment.md").read_text()
    return next(block for block in re.findall(rf"```{language}\n(.*?)```", text, re.S) if part in block)


def nginx(folder, port, gateway):
    certificate(folder / "chat", NAME)
    site = printed("nginx").replace("127.0.0.1:8080", gateway.client).replace("listen 443", f"listen 127.0.0.1:{port}")
    site = site.replace(f"/etc/ssl/{NAME}", str(folder / "chat"))
    own = f"daemon off; user root; pid {folder}/pid; error_log {folder}/log; events {{}}"
    temporary = " ".join(f"{what}_temp_path {folder}/{what};" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(f"{own}\nhttp {{ access_log off; {temporary}\n{site}\n}}\n")
    return [os.environ.get("NGINX", "nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(folder, port, gateway):
    site = printed("caddy").replace("127.0.0.1:8080", gateway.client)
    site = site.replace(f"{NAME} {{", f"https://{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls internal")
    own = f"{{\n\tadmin off\n\tskip_install_trust\n\tauto_https disable_redirects\n\tstorage file_system {folder}\n}}\n"
    (folder / "Caddyfile").write_text(own + site)
    return [os.environ.get("CADDY", "caddy"), "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


class Proxied:
    """A user whose requests go through the proxy."""

    def __init__(self, port, user):
        self.port, self.user = port, user
        self.token = jwt.encode({"sub": user, "exp": datetime.datetime.now().timestamp() + 3600}, SECRET)
        self.tls = ssl.create_default_context()
        self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE
        self.http = httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=False, timeout=PATIENCE)

    async def ask(self, method, path, content=None, **headers):
        tus = TUS if method in ("HEAD", "PATCH") else {}
        said = {"host": f"{NAME}:{self.port}", "authorization": f"Bearer {self.token}", **tus, **headers}
        said = {name.replace("_", "-"): value for name, value in said.items()}
        return await self.http.request(method, path, content=content, headers=said, extensions={"sni_hostname": NAME})

    async def connect(self):
        """Opens a WebSocket as a page of the gateway would, and returns it."""
        opened = await websockets.connect(
            f"wss://{NAME}:{self.port}/v1/ws", host="127.0.0.1", ssl=self.tls, proxy=None, subprotocols=["chat.v1.json"],
            origin=f"https://{NAME}:{self.port}", max_size=None)
        assert (await self.request(opened, type="connect", token=self.token))["type"] == "connected"
        return opened

    async def request(self, opened, **fields):
        await opened.send(json.dumps({"id": 1, **fields}))
        async with asyncio.timeout(PATIENCE):
            while (frame := json.loads(await opened.recv())).get("id") != 1:
                pass
        assert frame["type"] != "error", frame
        return frame

    def begin_part(self, path, data):
        """Begins to send a part. Returns the connection."""
        head = f"PATCH {path} HTTP/1.1\r\nHost: {NAME}:{self.port}\r\nAuthorization: Bearer {self.token}\r\nTus-Resumable: 1.0.0\r\n"
        head += f"Upload-Offset: 0\r\nContent-Type: application/offset+octet-stream\r\nContent-Length: {len(data)}\r\n\r\n"
        plain = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        raw = self.tls.wrap_socket(plain, server_hostname=NAME)
        raw.sendall(head.encode() + data[:BROKEN_AT])
        return raw

    async def offset(self, path):
        answer = await self.ask("HEAD", path)
        assert answer.status_code == 200
        return int(answer.headers["upload-offset"])


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
async def proxy(request, start, tmp_path):
    """The port of a proxy before a gateway that is configured as printed."""
    [trusted] = re.findall(r"trusted_proxies = (.*)", printed("toml", "trusted_proxies"))
    gateway = start(auth__keys=f'[{{algorithm = "HS256", secret = "{SECRET}"}}]', client__trusted_proxies=trusted)
    port = free_port()
    command = request.param(tmp_path, port, gateway)
    assert shutil.which(command[0]), f"{command[0]} is not installed: set NGINX and CADDY"
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(command, env={**os.environ, "HOME": str(tmp_path)}, stdout=output, stderr=output)
    alice = Proxied(port, "alice")

    async def answers():
        assert process.poll() is None, (tmp_path / "output").read_text()
        with contextlib.suppress(httpx.TransportError):
            return (await alice.ask("GET", "/icon.svg")).status_code == 200

    try:
        await eventually(answers)
        yield alice
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.embedded
async def test_uploads_downloads_and_websockets_pass_as_documented(proxy):
    alice, bob = proxy, Proxied(proxy.port, "bob")
    at_alice, at_bob = await alice.connect(), await bob.connect()
    dm = (await alice.request(at_alice, type="create", kind="dm", participants=["bob"]))["conversation"]
    data = os.urandom(SIZE)
    begun = await alice.ask("POST", "/v1/attachments", json.dumps({"conversation": dm, "name": "data.bin", "size": SIZE}),
                            content_type="application/json")
    assert begun.status_code == 201, begun.text
    file = begun.json()["id"]
    path = f"/v1/attachments/{file}/upload"
    part = await asyncio.to_thread(alice.begin_part, path, data)

    async def has_come():
        return await alice.offset(path) >= COME

    # A proxy may drop what it has not passed on when the client is gone.
    await eventually(has_come)
    part.close()

    async def goes_on():
        # The part that broke off is still being written for a moment: 423, or another offset. A proxy may close before the
        # client has read that.
        come = await alice.offset(path)
        with contextlib.suppress(httpx.TransportError):
            done = await alice.ask("PATCH", path, data[come:], upload_offset=str(come), content_type="application/offset+octet-stream")
            assert done.status_code in (204, 409, 423), (done.status_code, done.text)
            return done.status_code == 204 and done.headers["file-state"] == "ready"

    await eventually(goes_on)
    sent = await alice.request(at_alice, type="send", conversation=dm, client_id=uuid4(), body="", attachments=[{"id": file}])
    assert sent["type"] == "sent"
    async with asyncio.timeout(PATIENCE):
        while (event := json.loads(await at_bob.recv()))["type"] != "message":
            pass
    assert event["attachments"][0]["size"] == SIZE
    found = await bob.ask("GET", f"/v1/attachments/{file}")
    assert found.status_code == 302, found.text
    whole = await bob.ask("GET", found.headers["location"])
    assert (whole.status_code, whole.content) == (200, data)
    rest = await bob.ask("GET", found.headers["location"], range=f"bytes={SIZE - 5}-")
    assert (rest.status_code, rest.content) == (206, data[-5:])
    # The page is revalidated, though a proxy may have compressed it.
    page = await bob.ask("GET", "/page.js", accept_encoding="gzip")
    assert (await bob.ask("GET", "/page.js", if_none_match=page.headers["etag"])).status_code == 304
    for opened in (at_alice, at_bob):
        await opened.close()


@pytest.mark.embedded
async def test_other_bodies_stay_limited_as_documented(proxy):
    large = await proxy.ask("PUT", "/v1/devices/phone", b"{" + b" " * 140_000, content_type="application/json")
    assert large.status_code in (413, 502), "Caddy 2.6 says 502 when it stops reading"
    small = await proxy.ask("PUT", "/v1/devices/phone", b"{" + b" " * 65_000, content_type="application/json")
    assert small.status_code == 400, "it reaches the gateway"
    replay = await proxy.ask("POST", "/v1/consumers/orders/replay", b"{" + b" " * 127_000, content_type="application/json")
    assert replay.status_code in (400, 403), f"it reaches the gateway: {replay.status_code}"
