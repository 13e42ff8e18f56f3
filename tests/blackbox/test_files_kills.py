"""The life of uploaded files with `kill -9` at each step, and the sweep that finishes what was left."""
import asyncio
import io
import random

import httpx
import pytest
from PIL import Image

from changes import delete, entry
from clock import Clock, swept
from files import BucketUploader, Uploader, bytes_with, names_in, picture
from support import UNLIMITED, eventually, uuid4
from test_files_s3 import bucket  # noqa: F401, a fixture

pytestmark = pytest.mark.embedded
SECRET = b"SECRETPLACE"
HOUR = 3_600
DAY = 24 * HOUR


class Local:
    """Files in the directory of the gateway."""

    Uploader = Uploader
    settings = {}

    def __init__(self, gateway):
        self.gateway = gateway

    def names(self):
        return names_in(self.gateway)

    def bytes_with(self, marker):
        return bytes_with(self.gateway, marker)


class Remote:
    """Files in a bucket."""

    Uploader = BucketUploader

    def __init__(self, bucket):
        self.bucket = bucket

    def names(self):
        # An upload that the gateway does not know, because it was killed before it stored it, is for the rule of the bucket.
        return [*self.bucket.objects(), *self.bucket.parts()]

    def bytes_with(self, marker):
        return self.bucket.bytes_with(marker)


@pytest.fixture(params=["directory", "bucket"])
def place(request, start):
    """A gateway, and where its files are."""
    settings = {**UNLIMITED, "attachments__orphan_h": 1, "attachments__uploads_per_minute": 10_000}
    if request.param == "directory":
        gateway = start(**settings)
        return gateway, Local(gateway)
    storage = request.getfixturevalue("bucket")
    return start(**settings, **storage.settings()), Remote(storage)


def restart(place, clock=None):
    """Kills a gateway and starts it again, with another clock if there is one. A storage takes no requests of another time."""
    gateway, storage = place
    gateway.kill()
    prefix = clock.prefix if clock else []
    if isinstance(storage, Remote) and prefix != gateway.prefix:
        storage.bucket.kill()
        storage.bucket.start(prefix)
    gateway.prefix = prefix
    gateway.start()


def photo(number):
    """A photo that says where it was taken."""
    exif = Image.Exif()
    exif[0x010E] = SECRET.decode()
    return picture(format="JPEG", exif=exif, color=(number * 8 % 256, 30, 60))


class Life:
    """A file on its way, in steps. Each step may be repeated by a client that does not know whether it was done."""

    STEPS = ["begin", "half", "rest", "message", "drop", "erasing", "gone"]

    def __init__(self, place, dm, number=0):
        self.gateway, self.place = place
        self.dm, self.number = dm, number
        self.is_photo = number % 2 == 0
        self.marker = b"the marker of file %d;" % number
        self.data = photo(number) if self.is_photo else self.marker * 20_000
        self.client_id, self.file, self.seq = uuid4(), None, None
        self.is_remote = isinstance(self.place, Remote)

    async def connect(self):
        self.up = self.place.Uploader(self.gateway, "alice")
        self.alice = await self.gateway.connect("alice")

    async def close(self):
        await self.up.http.aclose()
        await self.alice.close()

    async def state(self):
        head = await self.up.head(self.file)
        return "erased" if head.status_code == 404 else head.headers["file-state"]

    async def begin(self):
        if not self.file:
            self.file = (await self.up.begin(self.dm, len(self.data), f"{self.number}.bin")).json()["id"]

    async def append(self, end):
        """Sends the bytes up to `end` that have not come."""
        begin = int((await self.up.head(self.file)).headers["upload-offset"])
        if begin < end:
            done = await self.up.append(self.file, begin, self.data[begin:end])
            assert done.status_code == 204, done.text

    async def half(self):
        """All bytes but the last ones, or with a bucket all: only the gateway can join them."""
        if not self.is_remote:
            return await self.append(len(self.data) - 1_000)
        for part in (await self.up.parts(self.file)).json()["parts"]:
            assert (await self.up.put(part, self.data)).status_code == 200

    async def rest(self):
        if self.is_remote:
            done = await self.up.complete(self.file)
            assert done.status_code == 200, done.text
        else:
            await self.append(len(self.data))

        async def is_ready():
            return await self.state() == "ready"

        await eventually(is_ready)

    async def message(self):
        sent = await self.alice.send(self.dm, "", self.client_id, attachments=[{"id": self.file}], retry=True)
        self.seq = sent["seq"]

    async def drop(self):
        await delete(self.alice, self.dm, self.seq)

    async def erasing(self):
        async def is_erasing():
            return await self.state() in ("erasing", "erased")

        await eventually(is_erasing)

    def names(self):
        return [name for name in self.place.names() if self.file in name]

    async def gone(self):
        async def is_gone():
            return not self.names()

        await eventually(is_gone)

    async def killed(self, step, delay):
        """Kills the gateway in the middle of a step, or after it if there is no delay."""
        doing = asyncio.ensure_future(getattr(self, step)())
        if delay is None:
            await doing
        else:
            await asyncio.sleep(delay)
        restart((self.gateway, self.place))
        [failed] = await asyncio.gather(doing, return_exceptions=True)
        assert failed is None or isinstance(failed, (httpx.TransportError, ConnectionError)), failed
        await self.close()
        await self.connect()

    async def live(self, step, delay):
        """Lives up to a step at which the gateway is killed. Unless the message is deleted then, it is sent."""
        await self.connect()
        for before in self.STEPS[:self.STEPS.index(step)]:
            await getattr(self, before)()
        await self.killed(step, delay)
        if step in ("drop", "erasing", "gone"):
            # It may not have come. Afterwards the file is left to a sweep.
            await self.drop()
        else:
            for after in self.STEPS[self.STEPS.index(step):self.STEPS.index("drop")]:
                await getattr(self, after)()
        await self.close()

    async def is_kept(self, bob):
        """Checks that the message has the file, and that its readers get it."""
        assert [m["seq"] for m in await bob.everything(self.dm) if m["client_id"] == self.client_id] == [self.seq]
        [attachment] = (await entry(bob, self.dm, self.seq))["attachments"]
        assert attachment["id"] == self.file
        down = self.place.Uploader(self.gateway, "bob")
        found = (await down.download(self.file)).content
        assert len(found) == attachment["size"]
        if not self.is_photo:
            assert found == self.data
            return
        assert SECRET not in found and (attachment["width"], attachment["height"]) == (800, 600)
        before, after = (Image.open(io.BytesIO(data)).tobytes() for data in (self.data, found))
        assert before == after
        assert (await down.download(self.file, variant="thumbnail")).headers["content-type"] == "image/jpeg"

    async def is_erased(self, clock=None):
        """Waits until nothing is left of the file. The gateway notes that a moment after the last byte is gone."""

        async def noted():
            return await self.state() == "erased"

        await (swept(self.gateway, clock, noted) if clock else eventually(noted))
        assert (await self.up.find(self.file)).status_code == 404
        assert self.place.bytes_with(self.marker) == []


async def begun(gateway):
    """A direct chat with a message."""
    alice = await gateway.connect("alice")
    dm = await alice.create("dm", "bob")
    await alice.send(dm, "hello")
    await alice.close()
    return dm


def kept(lives):
    """The names of the stored files of messages."""
    return sorted(name for life in lives for name in life.names())


async def only(place, clock, lives):
    """Waits until only the files of these lives are left."""
    gateway, storage = place

    async def are_left():
        return sorted(storage.names()) == kept(lives)

    await swept(gateway, clock, are_left)


async def test_kills_at_each_step_lose_no_file_and_leave_none(place, tmp_path):
    gateway, _ = place
    clock = Clock(tmp_path)
    dm = await begun(gateway)
    chance = random.Random(1)
    # Without a delay after the step, else in the middle of it.
    cases = [(step, None) for step in Life.STEPS]
    for step, times, longest in [("begin", 3, 0.02), ("half", 2, 0.02), ("rest", 8, 0.3), ("message", 4, 0.02), ("drop", 4, 0.02),
                                 ("erasing", 2, 2.3)]:
        cases += [(step, chance.random() ** 2 * longest) for _ in range(times)]
    lives = []
    for number, (step, delay) in enumerate(cases):
        lives.append(Life(place, dm, number))
        await lives[-1].live(step, delay)
    stay = [life for life, (step, _) in zip(lives, cases) if step not in ("drop", "erasing", "gone")]
    # An upload of which the store knows nothing stays for eight days.
    clock.forward(9 * DAY)
    restart(place, clock)
    await only(place, clock, stay)
    for life in lives:
        if life not in stay:
            await life.connect()
            await life.is_erased(clock)
            await life.close()
    restart(place)
    bob = await gateway.connect("bob")
    for life in lives:
        await life.connect()
        await (life.is_kept(bob) if life in stay else life.is_erased())
        await life.close()
    await bob.close()


async def test_a_sweep_removes_what_no_message_has(place, tmp_path):
    gateway, storage = place
    clock = Clock(tmp_path)
    dm = await begun(gateway)
    lives = {step: Life(place, dm, number) for number, step in enumerate(["message", "rest", "half", "begin"])}
    for last, life in lives.items():
        await life.connect()
        for step in Life.STEPS[:Life.STEPS.index(last) + 1]:
            await getattr(life, step)()
        await life.close()
    stays = lives.pop("message")
    # A photo with its thumbnail, a complete file, half of one.
    assert len(storage.names()) >= 4
    clock.forward(HOUR + 60)
    restart(place, clock)
    young = Life(place, dm, 9)
    await young.connect()
    for step in ("begin", "half", "rest"):
        await getattr(young, step)()
    await only(place, clock, [stays, young])
    await young.close()
    for life in lives.values():
        await life.connect()
        await life.is_erased(clock)
        await life.close()
    if isinstance(storage, Remote):
        assert storage.bucket.uploads() == []
        # A gateway that died wrote it, and the storage took its time.
        late = storage.bucket.root / storage.bucket.NAME / f"chat/files/{lives['rest'].file}/original"
        late.parent.mkdir(exist_ok=True)
        late.write_bytes(lives["rest"].marker)
    clock.forward(2 * DAY)
    restart(place, clock)
    await only(place, clock, [stays])
    restart(place)
    bob = await gateway.connect("bob")
    await stays.is_kept(bob)
    await bob.close()
