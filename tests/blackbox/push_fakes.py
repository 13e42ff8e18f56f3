"""Push services on loopback: Web Push, FCM and APNs, over TLS and HTTP/2. They check requests as the real ones do, with
libraries that the gateway does not use, and answer with any error on demand.

As a program: `push_fakes.py DIRECTORY` writes the keys and prints one line of JSON. It serves until its input ends.
"""
import asyncio
import base64
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections import deque
from ipaddress import ip_address
from pathlib import Path

import http_ece
import jwt
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypercorn.asyncio import serve
from hypercorn.config import Config

from certificates import certificate, pem

WEB, FCM, TOKEN, APNS = "web", "fcm", "token", "apns"
PAYLOAD_BYTES_MAX = 4096
# Names of data that FCM refuses.
RESERVED = re.compile(r"from|message_type|google.*|gcm.*")


def base64url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decoded(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def point(public):
    return public.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


class Refused(Exception):
    """An error response."""

    def __init__(self, status, body=None, **headers):
        super().__init__(status, body)
        self.answer = status, headers, body


class Browser:
    """A browser with a subscription."""

    def __init__(self, endpoint):
        self.private, self.auth = ec.generate_private_key(ec.SECP256R1()), os.urandom(16)
        keys = {"p256dh": base64url(point(self.private.public_key())), "auth": base64url(self.auth)}
        self.subscription = {"endpoint": endpoint, "expirationTime": None, "keys": keys}

    def decrypt(self, body):
        return http_ece.decrypt(body, private_key=self.private, auth_secret=self.auth, version="aes128gcm")


class PushFakes:
    """All three services, on one port."""

    PROJECT, EMAIL, KEY_ID, TEAM_ID, TOPIC = "chat-1", "push@chat-1.iam.gserviceaccount.com", "KEY1234567", "TEAM123456", "org.example.chat"

    def __init__(self, root):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.origin = f"https://localhost:{self.port}"
        self.browsers, self.access_tokens, self.devices = {}, set(), set()
        # For each service: what it received, and what it answers next instead of checking the request.
        self.received = {name: [] for name in (WEB, FCM, TOKEN, APNS)}
        self.answers = {name: deque() for name in (WEB, FCM, TOKEN, APNS)}
        self.make_keys()
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        certificate(self.root / "tls", "push services for tests", hosts)

    def make_keys(self):
        self.vapid, self.p8 = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        self.account = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        account = {
            "type": "service_account",
            "project_id": self.PROJECT,
            "private_key_id": "key-1",
            "private_key": pem(self.account),
            "client_email": self.EMAIL,
            "token_uri": f"{self.origin}/token",
        }
        (self.root / "push.pem").write_text(pem(self.vapid))
        (self.root / "firebase.json").write_text(json.dumps(account))
        (self.root / "apns.p8").write_text(pem(self.p8))

    def subscribe(self, name):
        """Returns the subscription of a new browser."""
        self.browsers[name] = Browser(f"{self.origin}/web/{name}")
        return self.browsers[name].subscription

    def settings(self):
        """Returns the settings of a gateway that uses these services. It must trust tls.pem (SSL_CERT_FILE)."""
        return {
            "push.allow": ["127.0.0.0/8", "::1/128"],
            "push.web.key_file": str(self.root / "push.pem"),
            "push.web.contact": "mailto:admin@example.org",
            "push.web.hosts": [f"localhost:{self.port}"],
            "push.fcm.key_file": str(self.root / "firebase.json"),
            "push.fcm.url": self.origin,
            "push.apns.key_file": str(self.root / "apns.p8"),
            "push.apns.key_id": self.KEY_ID,
            "push.apns.team_id": self.TEAM_ID,
            "push.apns.topic": self.TOPIC,
            "push.apns.url": self.origin,
        }

    def answer(self, service, status, body=None, **headers):
        """Sets what a service answers to the next request."""
        self.answers[service].append((status, headers, body))

    # The services. Each checks a request, notes it, and returns an answer.

    def web(self, path, headers, body, version):
        browser = self.browsers.get(path.removeprefix("/web/"))
        if browser is None:
            raise Refused(404)
        if len(body) > PAYLOAD_BYTES_MAX:
            raise Refused(413)
        match = re.fullmatch(r"vapid t=([^,]+), k=([\w-]+)", headers.get("authorization", ""))
        if match is None:
            raise Refused(401, "no VAPID")
        token, key = match.groups()
        if decoded(key) != point(self.vapid.public_key()):
            raise Refused(403, "another key than that of the subscription")
        public = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), decoded(key))
        claims = self.verified(token, public, "ES256", 403, audience=self.origin, require=["aud", "exp", "sub"])
        if claims["exp"] > time.time() + 24 * 3600 or not claims["sub"].startswith(("mailto:", "https:")):
            raise Refused(403, "exp or sub")
        if headers.get("content-encoding") != "aes128gcm":
            raise Refused(415)
        if not re.fullmatch(r"\d{1,7}", headers.get("ttl", "")) or not re.fullmatch(r"[\w-]{1,32}", headers.get("topic", "")):
            raise Refused(400, "ttl or topic")
        if headers.get("urgency") not in ("very-low", "low", "normal", "high"):
            raise Refused(400, "urgency")
        note = {"payload": json.loads(browser.decrypt(body)), "claims": claims}
        return 201, {"location": f"{self.origin}/sent"}, None, note

    def token(self, path, headers, body, version):
        form = dict(urllib.parse.parse_qsl(body.decode()))
        if form.get("grant_type") != "urn:ietf:params:oauth:grant-type:jwt-bearer":
            raise Refused(400, {"error": "unsupported_grant_type"})
        uri = f"{self.origin}/token"
        claims = self.verified(form["assertion"], self.account.public_key(), "RS256", 400, audience=uri, issuer=self.EMAIL)
        if claims["scope"] != "https://www.googleapis.com/auth/firebase.messaging" or claims["exp"] - claims["iat"] > 3600:
            raise Refused(400, {"error": "invalid_scope"})
        token = f"access-{len(self.received[TOKEN])}"
        self.access_tokens.add(token)
        return 200, {}, {"access_token": token, "expires_in": 3599, "token_type": "Bearer"}, {"claims": claims}

    def fcm(self, path, headers, body, version):
        if headers.get("authorization", "").removeprefix("Bearer ") not in self.access_tokens:
            raise Refused(*self.fcm_error(401, "UNAUTHENTICATED"))
        message = json.loads(body)["message"]
        data, shown = message["data"], message.get("notification", {})
        size = sum(len(str(key)) + len(str(value)) for key, value in [*data.items(), *shown.items()])
        if path != f"/v1/projects/{self.PROJECT}/messages:send":
            raise Refused(*self.fcm_error(404, "NOT_FOUND"))
        if size > PAYLOAD_BYTES_MAX or any(RESERVED.fullmatch(key) or not isinstance(value, str) for key, value in data.items()):
            raise Refused(*self.fcm_error(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT"))
        if not re.fullmatch(r"\d+s", message["android"]["ttl"]):
            raise Refused(*self.fcm_error(400, "INVALID_ARGUMENT", "INVALID_ARGUMENT"))
        if message["token"] not in self.devices:
            raise Refused(*self.fcm_error(404, "NOT_FOUND", "UNREGISTERED"))
        return 200, {}, {"name": f"projects/{self.PROJECT}/messages/1"}, {"message": message}

    @staticmethod
    def fcm_error(status, general, code=None):
        details = [{"@type": "type.googleapis.com/google.firebase.fcm.v1.FcmError", "errorCode": code}] if code else []
        return status, {"error": {"code": status, "message": "an error", "status": general, "details": details}}

    def apns(self, path, headers, body, version):
        def refuse(status, reason):
            raise Refused(status, {"reason": reason})

        if version != "2":
            refuse(505, "HTTP/2 only")
        token = headers.get("authorization", "").removeprefix("bearer ")
        if jwt.get_unverified_header(token).get("kid") != self.KEY_ID:
            refuse(403, "InvalidProviderToken")
        try:
            claims = jwt.decode(token, self.p8.public_key(), ["ES256"], issuer=self.TEAM_ID)
        except jwt.InvalidTokenError:
            refuse(403, "InvalidProviderToken")
        if abs(time.time() - claims["iat"]) > 3600:
            refuse(403, "ExpiredProviderToken")
        if headers.get("apns-topic") != self.TOPIC:
            refuse(400, "DeviceTokenNotForTopic")
        if not re.fullmatch(r"/3/device/[0-9a-f]{64,}", path) or path.removeprefix("/3/device/") not in self.devices:
            refuse(400, "BadDeviceToken")
        if len(headers.get("apns-collapse-id", "")) > 64:
            refuse(400, "BadCollapseId")
        payload = json.loads(body)
        aps = payload["aps"]
        if len(body) > PAYLOAD_BYTES_MAX:
            refuse(413, "PayloadTooLarge")
        kinds = {"alert": bool({"alert", "badge", "sound"} & set(aps)), "background": set(aps) == {"content-available"}}
        if not kinds.get(headers.get("apns-push-type")) or headers.get("apns-priority") not in ("5", "10"):
            refuse(400, "InvalidPushType")
        if not int(headers.get("apns-expiration", "0")) > time.time():
            refuse(400, "BadExpirationDate")
        return 200, {}, None, {"payload": payload, "claims": claims}

    @staticmethod
    def verified(token, key, algorithm, status, require=("exp", "iat"), **expected):
        try:
            return jwt.decode(token, key, [algorithm], options={"require": list(require)}, **expected)
        except jwt.InvalidTokenError as error:
            raise Refused(status, {"error": f"invalid_grant: {error}"}) from error

    def control(self, path, body):
        """For tests in other languages: what was received, and what to answer."""
        if path == "/control/received":
            return 200, {}, self.received
        asked = json.loads(body)
        if path == "/control/answer":
            self.answer(asked["service"], asked["status"], asked.get("body"), **asked.get("headers", {}))
        elif path == "/control/device":
            self.devices.add(asked["device"])
        elif path == "/control/subscribe":
            return 200, {}, self.subscribe(asked["name"])
        return 200, {}, None

    def answered(self, path, headers, body, version):
        if path.startswith("/control/"):
            return self.control(path, body)
        first = path.split("/")[1]
        service = {"web": WEB, "token": TOKEN, "v1": FCM, "3": APNS}.get(first)
        if service is None:
            return 404, {}, None
        note = {"path": path, "headers": headers, "version": version}
        self.received[service].append(note)
        if self.answers[service]:
            return self.answers[service].popleft()
        try:
            status, more, answer, noted = getattr(self, service)(path, headers, body, version)
            note.update(noted, ok=True)
            return status, more, answer
        except Refused as refused:
            note.update(refused=refused.answer[2])
            return refused.answer
        except Exception as error:  # A request that no real service would understand.
            note.update(refused=repr(error))
            return 400, {}, repr(error)

    async def app(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part.get("body", b""), part.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        status, extra, answer = self.answered(scope["path"], headers, body, scope["http_version"])
        answer = b"" if answer is None else answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        extra = [(name.replace("_", "-").encode(), str(value).encode()) for name, value in extra.items()]
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", str(len(answer)).encode()), *extra]})
        await send({"type": "http.response.body", "body": answer})

    async def serve(self, ended):
        config = Config()
        config.bind = [f"fd://{self.socket.detach()}"]
        config.certfile, config.keyfile = str(self.root / "tls.pem"), str(self.root / "tls.key")
        config.alpn_protocols = ["h2", "http/1.1"]
        config.loglevel = "ERROR"
        # A request on a connection that is just being closed fails. After the default of five seconds tests of a busy machine met that.
        config.keep_alive_timeout = 600
        await serve(self.app, config, shutdown_trigger=ended)

    def start(self):
        """Serves in a thread of its own."""
        self.loop, self.ended = asyncio.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self.serve(self.ended.wait)), daemon=True)
        self.thread.start()
        return self

    def stop(self):
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join()


def main():
    fakes = PushFakes(sys.argv[1]).start()
    print(json.dumps({"origin": fakes.origin, "port": fakes.port}), flush=True)
    sys.stdin.read()
    fakes.stop()


if __name__ == "__main__":
    main()
