"""Conformance with tus 1.0.0 (https://tus.io/protocols/resumable-upload), statement by statement: the core protocol and the
extensions creation, expiration and termination."""
import email.utils
import time

import httpx
import pytest

from files import TUS, Uploader, metadata
from support import PATIENCE, UNLIMITED, eventually

pytestmark = pytest.mark.embedded
PART = {**TUS, "content-type": "application/offset+octet-stream"}
DATA = b"the bytes of a file"


class Tus:
    """A client that sends exactly what a test says, with alice's token."""

    def __init__(self, gateway, conversation):
        self.up, self.conversation = Uploader(gateway, "alice"), conversation
        self.http = httpx.AsyncClient(base_url=f"http://{gateway.client}", timeout=PATIENCE)

    async def ask(self, method, path, content=b"", **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(method, path, content=content, headers=self.up.headers(**headers))

    async def create(self, size, **more):
        return await self.ask("POST", "/v1/attachments", **{
            **TUS, "upload-length": str(size), "upload-metadata": metadata(conversation=self.conversation, filename="a file.txt"), **more})

    async def begun(self, size=len(DATA)):
        answer = await self.create(size)
        assert answer.status_code == 201, answer.text
        return answer.headers["location"]

    async def head(self, place):
        return await self.ask("HEAD", place, **TUS)

    async def patch(self, place, offset, data, **more):
        return await self.ask("PATCH", place, data, **{**PART, "upload-offset": str(offset), **more})

    async def offset(self, place):
        return int((await self.head(place)).headers["upload-offset"])


@pytest.fixture
async def tus(start):
    gateway = start(**UNLIMITED, attachments__uploads_per_minute=1_000, attachments__size_max_mib=1)
    alice = await gateway.connect("alice")
    yield Tus(gateway, await alice.create("dm", "bob"))
    await alice.close()


async def test_core_the_server_says_what_it_can(tus):
    # Without a token, and whatever Tus-Resumable says.
    for path in ("/v1/attachments", await tus.begun()):
        for headers in ({}, TUS, {"tus-resumable": "0.2.2"}):
            answer = await tus.http.options(path, headers=headers)
            assert answer.status_code in (200, 204), (path, headers)
            assert answer.headers["tus-version"] == "1.0.0"
            assert set(answer.headers["tus-extension"].split(",")) == {"creation", "expiration", "termination"}
            assert answer.headers["tus-max-size"] == str(1 << 20)


async def test_core_head_returns_the_offset(tus):
    place = await tus.begun()
    assert (await tus.patch(place, 0, DATA[:5])).status_code == 204
    head = await tus.head(place)
    assert head.status_code in (200, 204)
    assert (head.headers["upload-offset"], head.headers["upload-length"]) == ("5", str(len(DATA)))
    assert head.headers["cache-control"] == "no-store" and head.headers["tus-resumable"] == "1.0.0"
    # Without an upload: 404, 410 or 403, and no Upload-Offset.
    for path in ("/v1/attachments/00000000-0000-4000-8000-000000000000/upload", "/v1/attachments/nonsense/upload"):
        gone = await tus.head(path)
        assert gone.status_code in (400, 403, 404, 410) and "upload-offset" not in gone.headers
        assert gone.headers["tus-resumable"] == "1.0.0"


async def test_core_patch_appends_at_the_offset_only(tus):
    place = await tus.begun()
    first = await tus.patch(place, 0, DATA[:5])
    assert (first.status_code, first.headers["upload-offset"], first.content) == (204, "5", b"")
    for wrong, status in [(n, 409) for n in ("0", "4", "6", "100000")] + [(n, 400) for n in ("-1", "+5", "5.0", "", "x")]:
        answer = await tus.patch(place, wrong, b"zzz")
        assert answer.status_code == status, wrong
        assert answer.headers["tus-resumable"] == "1.0.0"
    answer = await tus.ask("PATCH", place, b"zzz", **PART)
    assert answer.status_code == 400, "Upload-Offset is missing"
    assert await tus.offset(place) == 5
    for kind in ("text/plain", "application/octet-stream", "application/offset+octet-stream; charset=utf-8"):
        assert (await tus.patch(place, 5, b"zzz", content_type=kind)).status_code == 415, kind
    missing = {name: value for name, value in PART.items() if name != "content-type"}
    assert (await tus.ask("PATCH", place, b"zzz", **missing, upload_offset="5")).status_code == 415
    assert await tus.offset(place) == 5
    # A part without bytes changes nothing.
    empty = await tus.patch(place, 5, b"")
    assert (empty.status_code, empty.headers["upload-offset"]) == (204, "5")
    last = await tus.patch(place, 5, DATA[5:])
    assert (last.status_code, last.headers["upload-offset"]) == (204, str(len(DATA)))
    assert (await tus.up.download(place.split("/")[3])).content == DATA
    assert (await tus.patch(place, len(DATA), b"more")).status_code in (403, 404, 409)
    nothing = await tus.patch("/v1/attachments/00000000-0000-4000-8000-000000000000/upload", 0, b"x")
    assert nothing.status_code == 404


async def test_core_more_than_announced_is_refused(tus):
    place = await tus.begun()
    assert (await tus.patch(place, 0, DATA + b"!")).status_code == 413
    assert (await tus.patch(place, await tus.offset(place), DATA[await tus.offset(place):])).status_code == 204


async def test_core_other_versions_are_refused_and_do_nothing(tus):
    place = await tus.begun()
    requests = [
        ("POST", "/v1/attachments", {"upload-length": "5", "upload-metadata": metadata(conversation=tus.conversation, filename="x")}),
        ("HEAD", place, {}),
        ("PATCH", place, {**PART, "upload-offset": "0"}),
        ("DELETE", place, {}),
    ]
    for version in ("0.2.2", "1.0", "2.0.0", ""):
        for method, path, headers in requests:
            answer = await tus.ask(method, path, b"x" * (method == "PATCH"), **{**headers, "tus-resumable": version})
            assert (answer.status_code, answer.headers.get("tus-version")) == (412, "1.0.0"), (version, method)
            assert "location" not in answer.headers
    assert await tus.offset(place) == 0


async def test_core_every_response_has_the_version(tus):
    place = await tus.begun()
    for answer in (
        await tus.create(5), await tus.create(2 << 20), await tus.create("x"), await tus.head(place), await tus.patch(place, 7, b"x"),
        await tus.patch(place, 0, b"x", content_type="text/plain"), await tus.ask("PUT", place, b"x", **TUS),
        await tus.http.head(place, headers=TUS), await tus.http.patch(place, content=b"x", headers={**PART, "upload-offset": "0"}),
        await tus.patch(place, 0, DATA), await tus.ask("DELETE", place, **TUS),
    ):
        assert answer.headers.get("tus-resumable") == "1.0.0", (answer.request.method, answer.status_code, answer.text)


async def test_core_the_method_may_be_in_a_header(tus):
    place = await tus.begun()
    for actual in ("POST", "GET", "DELETE"):
        head = await tus.ask(actual, place, **TUS, x_http_method_override="HEAD")
        assert (head.status_code, head.headers["upload-offset"]) == (200, "0"), actual
    sent = await tus.ask("POST", place, DATA, **PART, upload_offset="0", x_http_method_override="PATCH")
    assert (sent.status_code, sent.headers["upload-offset"]) == (204, str(len(DATA)))
    assert (await tus.ask("PATCH", place, **TUS, x_http_method_override="OPTIONS")).headers["tus-version"] == "1.0.0"
    for unknown in ("PUT", "nonsense", "a b"):
        assert (await tus.ask("HEAD", place, **TUS, x_http_method_override=unknown)).status_code == 405, unknown
    assert (await tus.ask("POST", place, **TUS, x_http_method_override="DELETE")).status_code == 204


async def test_creation_returns_where_the_upload_is(tus):
    answer = await tus.create(len(DATA))
    assert (answer.status_code, answer.headers["tus-resumable"]) == (201, "1.0.0")
    place = answer.headers["location"]
    assert await tus.offset(place) == 0
    # The largest size, and more.
    assert (await tus.create(1 << 20)).status_code == 201
    assert (await tus.create((1 << 20) + 1)).status_code == 413
    for wrong in ("-1", "+1", "1.0", "x", "", "99999999999999999999999"):
        assert (await tus.create(wrong)).status_code == 400, wrong
    # Upload-Defer-Length belongs to an extension that is not announced.
    fields = {"upload-defer-length": "1", "upload-metadata": metadata(conversation=tus.conversation, filename="x")}
    assert (await tus.ask("POST", "/v1/attachments", **TUS, **fields)).status_code == 400


async def test_creation_of_an_empty_upload_completes_it(tus):
    answer = await tus.create(0)
    assert (answer.status_code, answer.headers["file-state"]) == (201, "ready")
    head = await tus.head(answer.headers["location"])
    assert (head.headers["upload-offset"], head.headers["upload-length"], head.headers["file-state"]) == ("0", "0", "ready")
    file = answer.json()["id"]
    found = await tus.up.download(file)
    assert (found.status_code, found.content, found.headers["content-length"]) == (200, b"", "0")


async def test_creation_metadata_is_in_head(tus):
    sent = metadata(conversation=tus.conversation, filename="a cat é.txt", alt="a description")
    answer = await tus.create(len(DATA), **{"upload-metadata": sent})
    assert (await tus.head(answer.headers["location"])).headers["upload-metadata"] == sent
    # Other programs send more, also keys without a value. The gateway keeps what it uses.
    more = metadata(conversation=tus.conversation, filename="x", filetype="text/plain") + ",is_confidential"
    answer = await tus.create(len(DATA), **{"upload-metadata": more})
    kept = metadata(conversation=tus.conversation, filename="x")
    assert (await tus.head(answer.headers["location"])).headers["upload-metadata"] == kept
    for wrong in (metadata(filename="x"), f"{kept},filename eA==", "conversation !", "", kept.replace(",", " , x y z")):
        assert (await tus.create(5, **{"upload-metadata": wrong})).status_code == 400, wrong


async def test_expiration_is_said(tus):
    created = await tus.create(len(DATA))
    place = created.headers["location"]
    answers = [created, await tus.patch(place, 0, DATA[:5]), await tus.head(place)]
    for answer in answers:
        at = email.utils.parsedate_to_datetime(answer.headers["upload-expires"]).timestamp()
        assert 23 * 3_600 < at - time.time() <= 24 * 3_600
        assert answer.headers["upload-expires"].endswith(" GMT")


async def test_termination_ends_an_upload(tus):
    place = await tus.begun()
    assert (await tus.patch(place, 0, DATA[:5])).status_code == 204
    ended = await tus.ask("DELETE", place, **TUS)
    assert (ended.status_code, ended.headers["tus-resumable"], ended.content) == (204, "1.0.0", b"")

    async def is_gone():
        return (await tus.head(place)).status_code in (404, 410)

    await eventually(is_gone)
    assert "upload-offset" not in (await tus.head(place)).headers
    assert (await tus.patch(place, 5, DATA[5:])).status_code in (404, 409, 410)
