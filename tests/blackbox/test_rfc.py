"""What RFC 9112 (HTTP/1.1), RFC 9110 (HTTP), RFC 6455 (WebSocket) and RFC 6750 (bearer tokens) say of a server: one row for
each requirement that applies to the gateway, with the request as bytes and what the answer must be. Rows without a request
say why a requirement does not apply, or where it is tested."""
import asyncio
import base64
import contextlib
import gzip
import hashlib
import json
import os
import re
import struct
from email.utils import parsedate_to_datetime

import pytest

from files import Uploader
from support import PATIENCE, UNLIMITED

KEY = "dGhlIHNhbXBsZSBub25jZQ=="


class Answer:
    """A response: its status, its headers (those of one name joined), its body, and the bytes after it."""

    def __init__(self, raw, method="GET"):
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        found = re.fullmatch(r"HTTP/1\.[01] (\d{3}) ?.*", lines[0])
        assert found, f"no status line: {raw[:200]!r}"
        self.status, self.headers = int(found[1]), {}
        for line in lines[1:]:
            name, value = line.split(":", 1)
            value, name = value.strip(), name.lower()
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        empty = method == "HEAD" or self.status in (204, 304) or self.status < 200
        length = 0 if empty else int(self.headers.get("content-length", len(rest)))
        self.body, self.rest = rest[:length], rest[length:]


class Server:
    def __init__(self, gateway):
        self.host, self.token = gateway.client, gateway.dev_token("alice")
        self.service = gateway.token("app", "--role", "service", "--scope", "messages:read")

    async def open(self):
        host, port = self.host.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port))

    async def say(self, said):
        """Sends text. Returns all that comes until the gateway closes."""
        reader, writer = await self.open()
        writer.write(said.encode())
        got = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while part := await reader.read(65_536):
                    got += part
        writer.close()
        return got


def request(line="GET /icon.svg HTTP/1.1", *headers, host="Host: {host}", close=True, body=""):
    """A request as text. `{host}`, `{token}` and `{service}` are filled in later."""
    lines = [line, *([host] if host else []), *headers, *(["Connection: close"] if close else [])]
    return "\r\n".join(lines) + "\r\n\r\n" + body


def status(*wanted, **headers):
    """A check of the status and of headers. A header is a text, a pattern, or None if it must not be there."""

    def check(answer):
        assert answer.status in wanted, (answer.status, answer.body[:200])
        for name, value in headers.items():
            got = answer.headers.get(name.replace("_", "-"))
            if value is None:
                assert got is None, (name, got)
            else:
                assert got is not None and re.search(value, got, re.I), (name, got)

    return check


PATCH = "PATCH /v1/attachments/{file}/upload HTTP/1.1"
TOKENS = "POST /v1/tokens HTTP/1.1"
JSON = "Content-Type: application/json"
USER = '{"user": "carol"}'
BEARER = "Authorization: Bearer {service}"

# Requirement: (document, section, level, what, request, check). The method of the request decides whether there is a body.
TABLE = [
    ("9112", "2.2", "SHOULD", "ignore an empty line before the request", "\r\n" + request(), status(200)),
    ("9112", "2.2", "MUST", "a bare CR is invalid", request("GET /icon.svg HTTP/1.1", "A: b\rc"), status(400)),
    ("9112", "2.2", "MUST", "reject or skip white space before the first header", "GET /icon.svg HTTP/1.1\r\n Host: {host}\r\n\r\n", status(400)),
    ("9112", "2.2", "SHOULD", "answer what is not HTTP with 400", "nonsense\r\n\r\n", status(400)),
    ("9112", "2.3", "MAY", "refuse another major version", request("GET /icon.svg HTTP/3.0"), status(400, 505)),
    ("9112", "3", "SHOULD", "answer an invalid request line with 400", request("GET /a b HTTP/1.1"), status(400)),
    ("9112", "3", "SHOULD", "501 for a longer method than any known", request("A" * 100 + " / HTTP/1.1"), status(501)),
    ("9112", "3", "MUST", "414 for a target that is too long", request("GET /" + "a" * 9000 + " HTTP/1.1"), status(414)),
    ("9112", "3", "MUST", "414: above the size of a whole head it is 431", request("GET /" + "a" * 20_000 + " HTTP/1.1"), status(414, 431)),
    ("9112", "3.2", "MUST", "400 without Host", request(host=None), status(400)),
    ("9112", "3.2", "MUST", "400 for two Host lines", request("GET /icon.svg HTTP/1.1", "Host: {host}"), status(400)),
    ("9112", "3.2", "MUST", "400 for an invalid Host", request(host="Host: a b"), status(400)),
    ("9112", "3.2", "MUST", "400 for a Host with a user", request(host="Host: a@b"), status(400)),
    ("9112", "3.2.1", "MUST", "HTTP/1.0 needs no Host", request("GET /icon.svg HTTP/1.0", host=None, close=False), status(200)),
    ("9112", "3.2.2", "MUST", "accept an absolute target", request("GET http://{host}/icon.svg HTTP/1.1"), status(200)),
    ("9112", "3.2.2", "MUST", "ignore Host if the target is absolute",
     request(TOKENS.replace("/v1", "http://evil.example/v1"), JSON, f"Content-Length: {len(USER)}", body=USER), status(404)),
    ("9112", "3.2.4", "MUST", "accept the target * of OPTIONS", request("OPTIONS * HTTP/1.1"), status(200, 204, 404, 405)),
    ("9112", "5.1", "MUST", "400 for white space between a name and the colon", request("GET /icon.svg HTTP/1.1", "A : b"), status(400)),
    ("9112", "5.2", "MUST", "reject or replace a folded line", request("GET /icon.svg HTTP/1.1", "A: b\r\n c"), status(400)),
    ("9112", "6.1", "MUST", "close after both Content-Length and Transfer-Encoding, or refuse",
     request(TOKENS, JSON, "Content-Length: 3", "Transfer-Encoding: chunked", close=False, body="0\r\n\r\n"), status(400)),
    ("9112", "6.1", "MUST", "treat Transfer-Encoding in HTTP/1.0 as faulty, and close",
     request(TOKENS.replace("1.1", "1.0"), JSON, "Transfer-Encoding: chunked", close=False, body="0\r\n\r\n"), status(400)),
    ("9112", "6.3", "MUST", "400 if the last coding is not chunked", request(TOKENS, JSON, "Transfer-Encoding: gzip"), status(400, 501)),
    ("9112", "6.1", "SHOULD", "501 (or 400) for an unknown coding", request(TOKENS, JSON, "Transfer-Encoding: foo, chunked", body="0\r\n\r\n"), status(400, 501)),
    ("9112", "6.3", "MUST", "400 for two different Content-Length", request(TOKENS, JSON, "Content-Length: 3", "Content-Length: 4", body="abcd"), status(400)),
    ("9112", "6.3", "MUST", "400 for an invalid Content-Length", request(TOKENS, JSON, "Content-Length: +3", body="abc"), status(400)),
    ("9112", "6.3", "MUST", "400 for a Content-Length without bound", request(TOKENS, JSON, "Content-Length: " + "9" * 30), status(400)),
    ("9112", "7.1", "MUST", "decode chunks, ignoring their extensions and trailers",
     request(TOKENS, JSON, "Transfer-Encoding: chunked", body=f"{len(USER):x};a=b\r\n{USER}\r\n0\r\nA: b\r\n\r\n"), status(200)),
    ("9112", "7.1", "MUST", "refuse a chunk size that overflows",
     request(TOKENS, JSON, "Transfer-Encoding: chunked", body="fffffffffffffffff\r\n"), status(400)),
    ("9112", "9.3", "MUST", "close after Connection: close", request("GET /icon.svg HTTP/1.1", close=True), status(200)),
    ("9112", "9.3", "SHOULD", "close HTTP/1.0 that does not ask to stay", request("GET /icon.svg HTTP/1.0", close=False), status(200)),
    ("9112", "9.6", "MUST", "say so in the last response before closing", request(host=None, close=False), status(400, connection="close")),
    ("9112", "9.3.2", "MUST", "answer pipelined requests in their order", None, "test_pipelined_requests_are_answered_in_order"),
    ("9112", "9.6", "SHOULD", "close in stages, so that the answer is read", None, "test_drain.py: test_a_client_can_read_why_its_upload_is_refused"),
    ("9112", "2.5", "SHOULD", "take HTTP/1.2 as 1.1", None, "does not hold: the library answers 400; no such version exists"),

    ("9110", "5.3", "MAY", "combine lines of one list", None, "test_a_websocket_may_be_asked_for_in_many_ways"),
    ("9110", "5.5", "MUST", "reject NUL in a value", request("GET /icon.svg HTTP/1.1", "A: b\0c"), status(400)),
    ("9110", "6.6.1", "MUST", "Date in 2xx", request(), status(200, date="GMT$")),
    ("9110", "6.6.1", "MUST", "Date in 4xx", request("GET /nowhere HTTP/1.1"), status(404, date="GMT$")),
    ("9110", "6.6.1", "MUST", "Date in 400 for what is not HTTP", "nonsense\r\n\r\n", status(400, date="GMT$")),
    ("9110", "7.2", "MUST", "reject a request for another authority", None, "only the internal port and development tokens depend on the host: test_hosts.py"),
    ("9110", "7.8", "MUST", "ignore Upgrade in HTTP/1.0",
     request("GET /v1/ws HTTP/1.0", "Upgrade: websocket", "Connection: upgrade", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", close=False), status(400)),
    ("9110", "7.8", "MUST", "ignore a protocol that is not known", request("GET /icon.svg HTTP/1.1", "Upgrade: foo", "Connection: upgrade, close", close=False), status(200)),
    ("9110", "8.6", "MUST", "no Content-Length in 204", request("OPTIONS /v1/attachments HTTP/1.1"), status(204, content_length=None)),
    ("9110", "8.6", "MUST", "no other Content-Length in an answer to HEAD", None, "test_head_has_the_headers_of_get"),
    ("9110", "9.1", "MUST", "GET", request(), status(200)),
    ("9110", "9.1", "SHOULD", "501 for a method that is not known", request("FROB /icon.svg HTTP/1.1"), status(501)),
    ("9110", "9.1", "MUST", "methods are case-sensitive", request("get /icon.svg HTTP/1.1"), status(501)),
    ("9110", "9.3.2", "MUST", "no body in an answer to HEAD", request("HEAD / HTTP/1.1"), status(200, content_type="html")),
    ("9110", "9.3.6", "MUST", "no tunnel", request("CONNECT {host} HTTP/1.1"), status(400, 404, 405)),
    ("9110", "9.3.8", "SHOULD", "no echo of a TRACE", request("TRACE /icon.svg HTTP/1.1", "Secret: 1"), status(405, allow="GET")),
    ("9110", "10.1.1", "MUST", "answer Expect: 100-continue with 100 or a final status", None, "test_a_client_that_expects_100_is_told_to_continue"),
    ("9110", "10.2.1", "MUST", "Allow in 405", request("DELETE /icon.svg HTTP/1.1"), status(405, allow="GET")),
    ("9110", "10.2.1", "MUST", "Allow in 405 of an operation", request("GET /v1/conversations HTTP/1.1"), status(405, allow="POST")),
    ("9110", "11.1", "MUST", "the scheme of credentials is case-insensitive", request("GET /v1/inbox HTTP/1.1", "Authorization: bEARER {service}"), status(200)),
    ("9110", "11.6.1", "MUST", "WWW-Authenticate in 401", request("GET /v1/inbox HTTP/1.1"), status(401, www_authenticate='^Bearer realm="[^"]+"$')),
    ("9110", "13.1.1", "MUST", "no answer if If-Match names another", request("GET /icon.svg HTTP/1.1", 'If-Match: "x"'), status(412)),
    ("9110", "13.1.1", "MUST", "If-Match compares strongly", request("GET /icon.svg HTTP/1.1", "If-Match: W/{etag}"), status(412)),
    ("9110", "13.1.1", "MUST", "If-Match that holds", request("GET /icon.svg HTTP/1.1", 'If-Match: "x", {etag}'), status(200)),
    ("9110", "13.1.2", "MUST", "304 if If-None-Match names it", request("GET /icon.svg HTTP/1.1", "If-None-Match: {etag}"), status(304, etag='^"')),
    ("9110", "13.1.2", "MUST", "If-None-Match compares weakly: a proxy that compresses makes it weak", request("GET /icon.svg HTTP/1.1", 'If-None-Match: "x", W/{etag}'), status(304)),
    ("9110", "13.1.2", "MUST", "If-None-Match: *", request("HEAD /icon.svg HTTP/1.1", "If-None-Match: *"), status(304)),
    ("9110", "13.1.2", "MUST", "If-None-Match in several lines", request("GET /icon.svg HTTP/1.1", 'If-None-Match: "x"', "If-None-Match: {etag}"), status(304)),
    ("9110", "13.1.2", "MUST", "If-None-Match of a download", request("GET {path} HTTP/1.1", "If-None-Match: W/{tag}"), status(304, etag='^"')),
    ("9110", "13.1.3", "MUST", "ignore If-Modified-Since without a time of modification",
     request("GET /icon.svg HTTP/1.1", "If-Modified-Since: Sat, 29 Oct 2050 19:43:31 GMT"), status(200)),
    ("9110", "13.1.5", "MUST", "If-Range that does not hold: the whole file", request("GET {path} HTTP/1.1", "Range: bytes=0-1", 'If-Range: "x"'), status(200, content_range=None)),
    ("9110", "13.1.5", "MUST", "If-Range compares strongly", request("GET {path} HTTP/1.1", "Range: bytes=0-1", "If-Range: W/{tag}"), status(200, content_range=None)),
    ("9110", "13.2.2", "MUST", "conditions come before the range", request("GET {path} HTTP/1.1", "Range: bytes=0-1", "If-None-Match: {tag}"), status(304)),
    ("9110", "13.2.1", "MUST", "ignore conditions if the answer is no success", request("GET /nowhere HTTP/1.1", 'If-Match: "x"'), status(404)),
    ("9110", "14.2", "MUST", "ignore Range of other methods than GET", request("HEAD {path} HTTP/1.1", "Range: bytes=0-1"), status(200, content_range=None)),
    ("9110", "14.2", "MUST", "ignore an unknown unit", request("GET {path} HTTP/1.1", "Range: lines=0-1"), status(200)),
    ("9110", "14.4", "MUST", "Content-Range in 206", request("GET {path} HTTP/1.1", "Range: bytes=1-3"), status(206, content_range="^bytes 1-3/4000$", content_length="^3$")),
    ("9110", "15.3.7", "MUST", "the headers of 200 in 206", request("GET {path} HTTP/1.1", "Range: bytes=1-3"), status(206, etag='^"', date="GMT", cache_control=".", content_type=".")),
    ("9110", "14.4", "SHOULD", "Content-Range in 416", request("GET {path} HTTP/1.1", "Range: bytes=4000-"), status(416, content_range=r"^bytes \*/4000$")),
    ("9110", "15.4.5", "MUST", "the headers of 200 in 304", request("GET {path} HTTP/1.1", "If-None-Match: {tag}"), status(304, cache_control=".", etag='^"', date="GMT")),
    ("9110", "15.3.2", "MUST", "201 says where", None, "test_files.py: `location` of an upload"),
    ("9110", "15.5.9", "SHOULD", "close after 408", None, "test_misuse_http.py"),
    ("9110", "15.5.14", "MAY", "413 for a large body", request(TOKENS, JSON, "Content-Length: 9000000"), status(413)),
    ("9110", "15.5.16", "MAY", "415 for another media type", request(TOKENS, "Content-Type: text/plain", f"Content-Length: {len(USER)}", body=USER), status(415)),
    ("9110", "15.5.22", "MUST", "Upgrade in 426",
     request("GET /v1/ws HTTP/1.1", "Upgrade: websocket", "Connection: upgrade, close", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 8", close=False),
     status(426, upgrade="websocket", sec_websocket_version="^13$")),
    ("9110", "9.3.7", "SHOULD", "OPTIONS says what is possible", request("OPTIONS /v1/attachments HTTP/1.1"), status(204, tus_version=".")),
    ("9110", "12", "MAY", "content negotiation", None, "does not apply: each resource has one representation"),
    ("9110", "7.6", "MUST", "forwarding", None, "does not apply: the gateway is no proxy"),

    ("6455", "4.2.1", "MUST", "a GET", request("POST /v1/ws HTTP/1.1", "Content-Length: 0"), status(405, allow="GET")),
    ("6455", "4.2.1", "MUST", "refuse without Upgrade", request("GET /v1/ws HTTP/1.1", "Connection: upgrade, close", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", close=False), status(400)),
    ("6455", "4.2.1", "MUST", "refuse without the token in Connection",
     request("GET /v1/ws HTTP/1.1", "Upgrade: websocket", "Connection: no-upgrade, close", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", close=False), status(400)),
    ("6455", "4.2.1", "MUST", "refuse without a key", request("GET /v1/ws HTTP/1.1", "Upgrade: websocket", "Connection: upgrade, close", "Sec-WebSocket-Version: 13", close=False), status(400)),
    ("6455", "4.2.1", "MUST", "refuse a key that is not 16 bytes",
     request("GET /v1/ws HTTP/1.1", "Upgrade: websocket", "Connection: upgrade, close", "Sec-WebSocket-Key: c2hvcnQ=", "Sec-WebSocket-Version: 13", close=False), status(400)),
    ("6455", "4.4", "MUST", "name the version in the answer to another one",
     request("GET /v1/ws HTTP/1.1", "Upgrade: websocket", "Connection: upgrade, close", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 14", close=False),
     status(426, sec_websocket_version="^13$")),
    ("6455", "4.2.2", "MUST", "403 for an origin that is not allowed",
     request("GET /v1/ws HTTP/1.1", "Upgrade: websocket", "Connection: upgrade, close", f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", "Origin: http://evil.example", close=False),
     status(403)),
    ("6455", "4.2.2", "MUST", "the accept value, one of the subprotocols, no extension", None, "test_a_websocket_may_be_asked_for_in_many_ways"),
    ("6455", "5 to 8", "MUST", "frames", None, "test_frames_that_break_the_rules_end_the_connection and test_frames_of_the_server_keep_the_rules"),

    ("6750", "2.1", "MUST", "a token in the header Authorization", request("GET /v1/inbox HTTP/1.1", BEARER), status(200)),
    ("6750", "2.2", "MAY", "a token in a body or a query", request("GET /v1/inbox?access_token={service} HTTP/1.1"), status(401)),
    ("6750", "3", "MUST", "a challenge if there is no token; no error in it", request("GET /v1/inbox HTTP/1.1"), status(401, www_authenticate='^Bearer realm="[^"]+"$')),
    ("6750", "3", "MUST", "a challenge if there is another scheme", request("GET /v1/inbox HTTP/1.1", "Authorization: Basic YTpi"), status(401, www_authenticate="^Bearer realm=")),
    ("6750", "3.1", "SHOULD", "invalid_token", request("GET /v1/inbox HTTP/1.1", "Authorization: Bearer x.y.z"), status(401, www_authenticate='error="invalid_token"')),
    ("6750", "3.1", "SHOULD", "insufficient_scope, and which",
     request("GET /v1/public HTTP/1.1", BEARER), status(403, www_authenticate='error="insufficient_scope", scope="conversations:read"')),
    ("6750", "3.1", "SHOULD", "insufficient_scope of a user's own token", request("GET /v1/public HTTP/1.1", "Authorization: Bearer {token}"), status(403, www_authenticate='insufficient_scope')),
    ("6750", "3.1", "SHOULD", "invalid_request if a token comes twice", request("GET /v1/inbox HTTP/1.1", BEARER, BEARER), status(400, www_authenticate='error="invalid_request"')),
    ("6750", "5.3", "MUST", "TLS", None, "a proxy has it: docs/deployment.md"),
]


def named(row):
    document, section, level, what, *_ = row
    return f"{document}-{section}-{level}-{what}".replace(" ", "_").replace("/", "_")


@pytest.fixture(scope="module")
def server():
    from support import Gateway, clean

    gateway = Gateway(limits__connects_burst_per_address=10_000, **UNLIMITED).start()
    server = Server(gateway)

    async def prepare():
        alice = await gateway.connect("alice")
        dm = await alice.create("dm", "bob")
        up = Uploader(gateway, "alice")
        file = await up.upload(dm, os.urandom(4000), "data.bin")
        path = (await up.find(file)).headers["location"]
        await alice.close()
        icon = Answer(await server.say(request().replace("{host}", server.host)))
        whole = Answer(await server.say(request(f"GET {path} HTTP/1.1").replace("{host}", server.host)))
        return {"path": path, "etag": icon.headers["etag"], "tag": whole.headers["etag"]}

    server.words = {"host": server.host, "token": server.token, "service": server.service, **asyncio.run(prepare())}
    yield server
    gateway.close()
    clean(gateway.directory)


def filled(text, words):
    return re.sub(r"\{(\w+)\}", lambda found: str(words.get(found[1], found[0])), text)


@pytest.mark.embedded
@pytest.mark.parametrize("row", [row for row in TABLE if row[4] is not None], ids=named)
async def test_requirement(server, row):
    _, _, _, _, said, check = row
    said = filled(said, server.words)
    got = await server.say(said)
    assert got, "the connection was closed without an answer"
    answer = Answer(got, said.lstrip().split(" ", 1)[0])
    check(answer)
    assert not answer.rest, f"bytes after the answer: {answer.rest[:100]!r}"
    if "date" in answer.headers:
        assert parsedate_to_datetime(answer.headers["date"])


@pytest.mark.embedded
async def test_head_has_the_headers_of_get(server):
    for path in ("/", "/icon.svg", "/openapi.json", server.words["path"]):
        get, head = [Answer(await server.say(filled(request(f"{method} {path} HTTP/1.1"), server.words)), method) for method in ("GET", "HEAD")]
        for answer in (get, head):
            answer.headers.pop("date")
        assert (head.status, head.headers) == (get.status, get.headers), path


@pytest.mark.embedded
async def test_the_page_is_compressed_for_those_who_take_it(server):
    async def get(path, *headers):
        return Answer(await server.say(filled(request(f"GET {path} HTTP/1.1", *headers), server.words)))

    for path in ("/", "/page.js", "/page.css"):
        plain, small = await get(path), await get(path, "Accept-Encoding: br, gzip")
        assert gzip.decompress(small.body) == plain.body and len(small.body) < len(plain.body)
        assert "content-encoding" not in plain.headers and small.headers["content-encoding"] == "gzip"
        assert plain.headers["vary"] == small.headers["vary"] == "accept-encoding"
        assert small.headers["etag"] == f"W/{plain.headers['etag']}"
        again = await get(path, "Accept-Encoding: br, gzip", f"If-None-Match: {small.headers['etag']}")
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", small.headers["etag"])
        assert (await get(path, "Accept-Encoding: gzip;q=0")).body == plain.body


@pytest.mark.embedded
async def test_pipelined_requests_are_answered_in_order(server):
    lines = ["GET /icon.svg HTTP/1.1", "GET /nowhere HTTP/1.1", "GET /v1/inbox HTTP/1.1"]
    said = "".join(request(line, close=line is lines[-1]) for line in lines)
    rest, statuses = await server.say(filled(said, server.words)), []
    while rest:
        answer = Answer(rest)
        statuses.append(answer.status)
        rest = answer.rest
    assert statuses == [200, 404, 401]
    # Nothing after Connection: close is carried out.
    said = filled(request() + request(), server.words)
    assert Answer(await server.say(said)).rest == b""


@pytest.mark.embedded
async def test_a_client_that_expects_100_is_told_to_continue(server):
    reader, writer = await server.open()
    writer.write(filled(request(TOKENS, JSON, f"Content-Length: {len(USER)}", "Expect: 100-continue"), server.words).encode())
    async with asyncio.timeout(PATIENCE):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(USER.encode())
        assert Answer(await reader.read()).status == 200
    writer.close()
    # A request that is refused anyway need not send its body.
    got = await server.say(filled(request(TOKENS, JSON, "Content-Length: 9000000", "Expect: 100-continue"), server.words))
    assert Answer(got).status == 413


def handshake(*headers, connection=("Connection: Upgrade",), upgrade="Upgrade: websocket"):
    return request("GET /v1/ws HTTP/1.1", upgrade, *connection, f"Sec-WebSocket-Key: {KEY}", "Sec-WebSocket-Version: 13", *headers, close=False)


async def websocket(server, said=None):
    """Opens a WebSocket by hand. Returns the answer, the reader and the writer."""
    reader, writer = await server.open()
    writer.write(filled(said or handshake(), server.words).encode())
    async with asyncio.timeout(PATIENCE):
        return Answer(await reader.readuntil(b"\r\n\r\n")), reader, writer


@pytest.mark.embedded
@pytest.mark.parametrize("said, protocol", [
    (handshake(), None),
    (handshake(connection=("Connection: keep-alive", "Connection: Upgrade")), None),
    (handshake(connection=("Connection: keep-alive, UPGRADE",)), None),
    (handshake(upgrade="Upgrade: WebSocket"), None),
    (handshake(upgrade="Upgrade: foo, websocket"), None),
    (handshake("Sec-WebSocket-Protocol: other, chat.v1.json"), "chat.v1.json"),
    (handshake("Sec-WebSocket-Protocol: other", "Sec-WebSocket-Protocol: chat.v1.msgpack"), "chat.v1.msgpack"),
    (handshake("Sec-WebSocket-Extensions: permessage-deflate"), None),
], ids=range(8))
async def test_a_websocket_may_be_asked_for_in_many_ways(server, said, protocol):
    answer, _, writer = await websocket(server, said)
    accept = base64.b64encode(hashlib.sha1((KEY + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()).decode()
    assert answer.status == 101, answer.body
    assert (answer.headers["upgrade"].lower(), answer.headers["connection"].lower()) == ("websocket", "upgrade")
    assert answer.headers["sec-websocket-accept"] == accept
    assert answer.headers.get("sec-websocket-protocol") == protocol
    assert "sec-websocket-extensions" not in answer.headers and "content-length" not in answer.headers
    writer.close()


def frame(opcode, data=b"", fin=True, masked=True, rsv=0, length=None):
    """A frame of a client (RFC 6455, section 5.2). `length` is how the length is written, if not as it must be."""
    head = bytes([fin << 7 | rsv << 4 | opcode])
    size = len(data) if length is None else length
    bit = masked << 7
    if isinstance(size, bytes):
        head += size
    elif size < 126:
        head += bytes([bit | size])
    elif size < 1 << 16:
        head += bytes([bit | 126]) + struct.pack(">H", size)
    else:
        head += bytes([bit | 127]) + struct.pack(">Q", size)
    mask = b"\x01\x02\x03\x04"
    return head + (mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)) if masked else data)


async def read_frame(reader):
    """Reads a frame of the server. Returns its opcode and data; None if the connection ended."""
    try:
        async with asyncio.timeout(PATIENCE):
            first, second = await reader.readexactly(2)
            assert first & 0x70 == 0 and first & 0x80, "no reserved bits, no fragments"
            assert second & 0x80 == 0, "a server does not mask"
            size = second & 0x7F
            if size == 126:
                size = struct.unpack(">H", await reader.readexactly(2))[0]
                assert size >= 126
            elif size == 127:
                size = struct.unpack(">Q", await reader.readexactly(8))[0]
                assert size >= 1 << 16
            assert first & 0x08 == 0 or size < 126
            return first & 0x0F, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
BROKEN = {
    "5.1 a frame without a mask": frame(TEXT, b"{}", masked=False),
    "5.2 a reserved bit": frame(TEXT, b"{}", rsv=4),
    "5.2 a reserved opcode": frame(3, b"{}"),
    "5.2 a reserved opcode of control": frame(11),
    "5.2 a length with its highest bit": frame(TEXT, length=bytes([0xFF]) + b"\xff" * 8),
    "5.4 a fragment of nothing": frame(0, b"x"),
    "5.4 a message in a message": frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"),
    "5.5 a long control frame": frame(PING, b"x" * 126),
    "5.5 a control frame in fragments": frame(PING, b"x", fin=False),
    "5.5.1 a close with one byte": frame(CLOSE, b"\x03"),
    "5.5.1 a close with a wrong text": frame(CLOSE, struct.pack(">H", 1000) + b"\xff"),
    "7.4.1 a close code that is never sent": frame(CLOSE, struct.pack(">H", 1005)),
    "7.4.2 a close code below 1000": frame(CLOSE, struct.pack(">H", 999)),
    "8.1 text that is not UTF-8": frame(TEXT, b"\xff\xfe"),
}


@pytest.mark.embedded
@pytest.mark.parametrize("connected", [False, True], ids=["before_connect", "after_connect"])
@pytest.mark.parametrize("what", BROKEN)
async def test_frames_that_break_the_rules_end_the_connection(server, what, connected):
    """RFC 6455: the server must fail the connection."""
    answer, reader, writer = await websocket(server)
    assert answer.status == 101
    if connected:
        writer.write(frame(TEXT, json.dumps({"type": "connect", "id": 1, "token": server.token}).encode()))
        opcode, data = await read_frame(reader)
        assert (opcode, json.loads(data)["type"]) == (TEXT, "connected")
    writer.write(BROKEN[what])
    got = []
    while (next_frame := await read_frame(reader)) is not None:
        got.append(next_frame)
        if next_frame[0] == CLOSE:
            with contextlib.suppress(ConnectionError):
                writer.write(frame(CLOSE, next_frame[1][:2]))
    codes = [struct.unpack(">H", data[:2])[0] for opcode, data in got if opcode == CLOSE and data]
    assert not codes or codes[0] in (1002, 1007, 1009, 4500), (what, codes)
    assert all(opcode == CLOSE for opcode, _ in got), (what, got)
    writer.close()


@pytest.mark.embedded
async def test_frames_of_the_server_keep_the_rules(server):
    """RFC 6455, 5.4 to 5.5: fragments, pings between them, pongs with the same bytes, and a close that is answered."""
    _, reader, writer = await websocket(server)
    connect = json.dumps({"type": "connect", "id": 1, "token": server.token}).encode()
    writer.write(frame(PONG, b"unasked"))
    writer.write(frame(TEXT, connect[:10], fin=False) + frame(PING, b"in between") + frame(0, b"", fin=False) + frame(0, connect[10:]))
    assert await read_frame(reader) == (PONG, b"in between")
    opcode, data = await read_frame(reader)
    assert (opcode, json.loads(data)["type"]) == (TEXT, "connected")
    writer.write(frame(PING, b"x" * 125))
    assert await read_frame(reader) == (PONG, b"x" * 125)
    # A character may be split between fragments.
    said = json.dumps({"type": "ping", "id": 2, "note": "ä"}, ensure_ascii=False).encode()
    at = said.index("ä".encode()) + 1
    writer.write(frame(TEXT, said[:at], fin=False) + frame(0, said[at:]))
    opcode, data = await read_frame(reader)
    assert (opcode, json.loads(data)["type"]) == (TEXT, "pong")
    writer.write(frame(CLOSE, struct.pack(">H", 1000) + b"bye") + frame(TEXT, said))
    opcode, data = await read_frame(reader)
    assert (opcode, data[:2]) == (CLOSE, struct.pack(">H", 1000))
    assert await read_frame(reader) is None, "the server closes the connection, and answers nothing after a close"
    writer.close()


@pytest.mark.embedded
async def test_frames_of_the_server_have_their_shortest_length(server):
    """RFC 6455, 5.2: checked by `read_frame` for each length."""
    _, reader, writer = await websocket(server)
    writer.write(frame(TEXT, json.dumps({"type": "connect", "id": 1, "token": server.token}).encode()))
    await read_frame(reader)
    for size in (0, 90, 125, 126, 200, 60_000):
        writer.write(frame(TEXT, json.dumps({"type": "nonsense" + "x" * size, "id": 2}).encode()))
        opcode, data = await read_frame(reader)
        assert (opcode, json.loads(data)["type"]) == (TEXT, "error")
    writer.close()
