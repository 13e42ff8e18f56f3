"""A real Firefox, driven by WebDriver BiDi, and the push service that it holds a connection to."""
import asyncio
import base64
import contextlib
import json
import os
import pathlib
import re
import signal
import tempfile
import uuid

import websockets

from support import PATIENCE, clean, eventually

# The protocol of Mozilla's push service. https://mozilla-services.github.io/autopush-rs
PROTOCOL = "push-notification"
PREFERENCES = {
    "dom.push.serverURL": "ws://127.0.0.1:{port}/",
    "dom.push.testing.allowInsecureServerURL": True,
    # The recommended preferences turn the push service off.
    "remote.prefs.recommended": False,
    # 1: allowed. Without a person nobody could be asked.
    "permissions.default.desktop-notification": 1,
    # Firefox shows the notifications itself, because there is no desktop.
    "alerts.useSystemBackend": False,
    "network.manage-offline-status": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "services.settings.server": "data:,",
    "browser.safebrowsing.update.enabled": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "app.normandy.enabled": False,
    "browser.aboutwelcome.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
}


async def received(socket):
    """Returns the next frame, or nothing at the end."""
    with contextlib.suppress(websockets.ConnectionClosed):
        return await socket.recv()


class PushServer:
    """The browser's push service: the fakes take the requests of the gateway, and this hands them on to the browser."""

    def __init__(self, fakes):
        self.fakes, self.browser, self.acknowledged = fakes, None, 0

    async def start(self):
        self.loop = asyncio.get_running_loop()
        self.server = await websockets.serve(self.serve, "127.0.0.1", 0, subprotocols=[PROTOCOL], ping_interval=None)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def stop(self):
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, socket):
        self.browser = socket
        # A browser that ends does not close its connection.
        while text := await received(socket):
            asked = json.loads(text)
            kind = asked.get("messageType")
            if kind == "hello":
                await self.say(messageType="hello", status=200, use_webpush=True, uaid=asked.get("uaid") or uuid.uuid4().hex)
            elif kind == "register":
                channel = asked["channelID"]
                self.fakes.browsers[channel] = Channel(self, channel)
                endpoint = f"{self.fakes.origin}/web/{channel}"
                await self.say(messageType="register", status=200, channelID=channel, pushEndpoint=endpoint)
            elif kind == "unregister":
                self.fakes.browsers.pop(asked["channelID"], None)
                await self.say(messageType="unregister", status=200, channelID=asked["channelID"])
            elif kind == "ack":
                self.acknowledged += len(asked["updates"])

    async def say(self, **fields):
        await self.browser.send(json.dumps(fields))


class Channel:
    """One subscription of the browser, which keeps the keys."""

    def __init__(self, server, channel):
        self.server, self.channel = server, channel

    def decrypt(self, body):
        """Called by the fakes, in their thread. Only the browser can decrypt the body."""
        data = base64.urlsafe_b64encode(body).rstrip(b"=").decode()
        said = self.server.say(
            messageType="notification", channelID=self.channel, version=uuid.uuid4().hex, data=data, headers={"encoding": "aes128gcm"}
        )
        asyncio.run_coroutine_threadsafe(said, self.server.loop).result(PATIENCE)
        return b"{}"


class Firefox:
    """One browser with a fresh profile and one tab."""

    def __init__(self, push_port):
        self.profile = tempfile.mkdtemp(prefix="chat-firefox-")
        self.process = self.socket = None
        values = {name: value.format(port=push_port) if isinstance(value, str) else value for name, value in PREFERENCES.items()}
        with open(f"{self.profile}/user.js", "w") as file:
            file.writelines(f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in values.items())

    async def start(self):
        self.process = await asyncio.create_subprocess_exec(
            "firefox-esr", "--headless", "--no-remote", "--profile", self.profile, "--remote-debugging-port", "0", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env={**os.environ, "HOME": self.profile},
            start_new_session=True,
        )
        async with asyncio.timeout(PATIENCE):
            while not (found := re.search(rb"WebDriver BiDi listening on (ws://\S+)", line := await self.process.stderr.readline())):
                assert line, "Firefox ended"
        self.reading = asyncio.create_task(self.process.stderr.read())
        address = found[1].decode() + "/session"
        self.socket = await websockets.connect(address, max_size=None, open_timeout=PATIENCE, ping_interval=None, proxy=None)
        self.number = 0
        await self.ask("session.new", capabilities={})
        self.tab = (await self.ask("browsingContext.getTree"))["contexts"][0]["context"]
        return self

    async def close(self):
        if self.socket:
            await self.socket.close()
        if self.process:
            # It has processes of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        clean(self.profile)

    async def ask(self, method, **params):
        self.number += 1
        await self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        async with asyncio.timeout(PATIENCE):
            while (answer := json.loads(await self.socket.recv())).get("id") != self.number:
                pass
        assert answer["type"] == "success", answer
        return answer["result"]

    async def open(self, url):
        await self.ask("browsingContext.navigate", context=self.tab, url=url, wait="complete")

    async def run(self, body):
        """Runs the body of an async function in the page, as if a person had just clicked. Returns what it returns."""
        answer = await self.ask(
            "script.evaluate", expression=f"(async () => JSON.stringify(await (async () => {{ {body} }})() ?? null))()",
            target={"context": self.tab}, awaitPromise=True, userActivation=True,
        )
        assert answer["type"] == "success", answer
        return json.loads(answer["result"]["value"])

    async def until(self, expression):
        async def holds():
            return await self.run(f"return {expression};")

        return await eventually(holds)

    async def picture(self, path):
        answer = await self.ask("browsingContext.captureScreenshot", context=self.tab)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(answer["data"]))
