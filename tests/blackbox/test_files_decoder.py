"""Pictures are decoded in processes of their own, so that a picture takes from the gateway and its users nothing."""
import asyncio
import json
import os
import resource
import signal

import pytest

import bombs
from changes import entry
from files import Decoders, Uploader, is_running, memory_of, picture
from support import UNLIMITED, eventually
from test_files import closed, two

pytestmark = pytest.mark.embedded

# Of docs/attachments.md, in MiB.
DECODER_MAX = 768
GATEWAY_MAX = 96


def uploader(gateway, user):
    up = Uploader(gateway, user)
    # A build without optimisation decodes slowly.
    up.http.timeout = 300
    return up


async def shown(up, file):
    """Whether a file is a picture that browsers show."""
    found = await up.download(file)
    assert found.status_code == 200
    has_thumbnail = (await up.find(file, variant="thumbnail")).status_code == 302
    assert has_thumbnail == (found.headers["content-type"] != "application/octet-stream")
    return has_thumbnail


# It needs more than a decoder may have.
HOSTILE = [bombs.webp_of_many_codes]
# These need much, but not too much. Without optimisation some need more CPU time than they may, and are downloads.
LARGE = [bombs.png_with_profile, bombs.png_of_16_bits, bombs.jpeg_of_cmyk, bombs.large_gif]


@pytest.mark.parametrize("bomb", HOSTILE + LARGE, ids=lambda bomb: bomb.__name__)
async def test_a_picture_takes_no_more_memory_than_the_documents_say(start, bomb):
    gateway, alice, bob, dm = await two(start)
    up, other = uploader(gateway, "alice"), uploader(gateway, "bob")
    await up.upload(dm, picture())
    before = memory_of(gateway.process.pid)
    watching = asyncio.create_task(Decoders(gateway).peaks())
    file = await up.upload(dm, bomb(), "bomb")
    watching.cancel()
    peaks = await watching
    grown = memory_of(gateway.process.pid) - before
    print(f"{bomb.__name__}: gateway +{grown:.0f} MiB, decoder (memory, addresses) {peaks}")
    assert grown < GATEWAY_MAX
    assert peaks, "it was decoded in a process of its own"
    assert all(addresses <= DECODER_MAX for _, addresses in peaks.values())
    assert bomb not in HOSTILE or not await shown(up, file)
    # Messages may have it, and the next picture is shown.
    sent = await alice.send(dm, "", attachments=[{"id": file}])
    assert (await entry(bob, dm, sent["seq"]))["attachments"][0]["id"] == file
    assert await shown(other, await other.upload(dm, picture()))
    await closed(alice, bob)


async def test_a_process_that_decodes_has_nothing_of_the_gateway(start):
    gateway, alice, bob, dm = await two(start)
    up = uploader(gateway, "alice")
    uploading = asyncio.create_task(up.upload(dm, bombs.large_gif(), "large.gif"))
    child = await Decoders(gateway).next()
    try:
        assert sorted(os.listdir(f"/proc/{child}/fd")) == ["0", "1", "2"]
        with open(f"/proc/{child}/environ", "rb") as environment:
            assert [of.split(b"=")[0] for of in environment.read().split(b"\0") if of] == [b"_RJEM_MALLOC_CONF"]
        assert "NoNewPrivs:\t1\n" in open(f"/proc/{child}/status").read()
        limits = open(f"/proc/{child}/limits").read().splitlines()
        limits = {line[:26].strip(): line[26:].split()[:2] for line in limits[1:]}
        assert limits["Max address space"] == [str(DECODER_MAX << 20)] * 2
        assert limits["Max cpu time"] == ["20", "20"]
        for none in ("Max file size", "Max core file size", "Max open files", "Max processes"):
            assert limits[none] == ["0", "0"], none
        assert open(f"/proc/{child}/oom_score_adj").read() == "1000\n"
        assert os.sched_getscheduler(child) == os.SCHED_IDLE
        assert os.getpgid(child) == child, "the signals of a terminal do not reach it"
    finally:
        os.kill(child, signal.SIGCONT)
    await uploading
    await closed(alice, bob)


async def test_a_picture_is_decoded_later_if_its_decoder_cannot_be_started(start):
    gateway, alice, bob, dm = await two(start)
    up = uploader(gateway, "alice")
    data = picture()
    file = (await up.begin(dm, len(data))).json()["id"]
    pid = gateway.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(descriptor) for descriptor in os.listdir(f"/proc/{pid}/fd")}
    # Files are read and written one at a time. The pipes to a process need more.
    some = [n for n in range(max(taken) + 4) if n not in taken][2] + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (some, before[1]))
    try:
        assert (await up.append(file, 0, data)).headers["file-state"] == "scanning"
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    told = await alice.event("attachment", lambda event: event["file"] == file)
    assert (told["state"], told.get("width")) == ("ready", 800)
    assert await shown(up, file)
    await closed(alice, bob)


async def test_a_picture_is_looked_at_again_after_a_gateway_that_stopped(start):
    gateway, alice, bob, dm = await two(start)
    up = uploader(gateway, "alice")
    await closed(alice, bob)
    for stop in (gateway.stop, gateway.kill):
        data = picture(3_000, 2_000)
        file = (await up.begin(dm, len(data))).json()["id"]
        uploading = asyncio.create_task(up.append(file, 0, data))
        child = await Decoders(gateway).next()
        # Its process is stopped, and would never end by itself.
        await asyncio.to_thread(stop)
        assert stop != gateway.stop or gateway.process.returncode == 0

        async def is_gone():
            return not is_running(child)

        await eventually(is_gone)
        answer = await asyncio.gather(uploading, return_exceptions=True)
        assert isinstance(answer[0], Exception) or answer[0].status_code == 503
        gateway.start()
        up = uploader(gateway, "alice")

        async def is_ready():
            return (await up.head(file)).headers["file-state"] == "ready"

        await eventually(is_ready)
        assert await shown(up, file)


async def in_work(gateway, work, count):
    """Waits until so many files wait or are worked on."""

    async def are():
        return gateway.metrics().get(f'chat_files_in_work{{work="{work}"}}') == count

    await eventually(are)


async def test_others_do_not_wait_for_the_pictures_of_a_user(start):
    gateway, alice, bob, dm = await two(start)
    many, one = uploader(gateway, "alice"), uploader(gateway, "bob")
    first = asyncio.create_task(many.upload(dm, bombs.large_gif(), "large.gif"))
    # It is paused, so nothing after it can be decoded.
    child = await Decoders(gateway).next()
    try:
        more = [asyncio.create_task(many.upload(dm, picture())) for _ in range(3)]
        await in_work(gateway, "picture", 4)
        # Messages and other files pass, also those of the same user.
        sent = await bob.send(dm, "hello")
        assert (await alice.message(dm))["seq"] == sent["seq"]
        for up in (many, one):
            await up.upload(dm, b"ten bytes!", "text.txt")
        another = asyncio.create_task(one.upload(dm, picture()))
        await in_work(gateway, "picture", 5)
        assert not any(task.done() for task in (first, another, *more))
    finally:
        os.kill(child, signal.SIGCONT)
    # The other user is next, before the other pictures of the first one.
    await first
    done, _ = await asyncio.wait([another, *more], return_when=asyncio.FIRST_COMPLETED)
    assert another in done
    await asyncio.gather(another, *more)
    await closed(alice, bob)


async def test_a_user_with_too_many_pictures_is_told_later(start):
    gateway, alice, bob, dm = await two(start, attachments__uploads_at_once=64)
    up, other = uploader(gateway, "alice"), uploader(gateway, "bob")
    first = asyncio.create_task(up.upload(dm, bombs.large_gif(), "large.gif"))
    child = await Decoders(gateway).next()
    try:
        more = [asyncio.create_task(up.upload(dm, picture())) for _ in range(7)]
        await in_work(gateway, "picture", 8)
        data = picture()
        file = (await up.begin(dm, len(data))).json()["id"]
        assert (await up.append(file, 0, data)).headers["file-state"] == "scanning"
        # The places of uploads are free, also for others.
        await other.upload(dm, b"ten bytes!", "text.txt")
    finally:
        os.kill(child, signal.SIGCONT)
    await asyncio.gather(first, *more)
    told = await alice.event("attachment", lambda event: event["file"] == file)
    assert (told["state"], told["width"]) == ("ready", 800)
    assert await shown(up, file)
    await closed(alice, bob)


async def test_an_import_decodes_no_picture_itself(start, tmp_path):
    gateway = start(**UNLIMITED)
    gateway.stop()
    for name, data in (("bomb", bombs.webp_of_many_codes()), ("cat", picture())):
        (tmp_path / name).write_bytes(data)
    file = tmp_path / "export.jsonl"
    lines = [
        {"type": "conversation", "kind": "dm", "participants": ["alice", "bob"]},
        {"type": "message", "dm": ["alice", "bob"], "sender": "alice", "body": "look", "files": [{"path": "bomb"}, {"path": "cat"}]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    await asyncio.to_thread(gateway.command, "import", str(file))
    gateway.start()
    bob = await gateway.connect("bob")
    [message] = [entry for entry in await bob.everything(await bob.create("dm", "alice")) if entry.get("body") == "look"]
    assert [(of["name"], of["mime"], of.get("width")) for of in message["attachments"]] == [
        ("bomb", "application/octet-stream", None), ("cat", "image/png", 800)]
    await closed(bob)
