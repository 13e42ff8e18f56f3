"""Pushing to a real Firefox: the chat page subscribes, and its service worker shows what the gateway pushes while the page is closed."""
import os

import pytest

from firefox import Firefox, PushServer
from support import eventually
from test_push import pushing  # noqa: F401, a fixture

pytestmark = pytest.mark.embedded

NOTES = """
  const [registration] = await navigator.serviceWorker.getRegistrations();
  return (await registration.getNotifications()).map(({ title, body }) => `${title}: ${body}`);
"""


@pytest.fixture
async def firefox(pushing):
    server = await PushServer(pushing.fakes).start()
    browser = Firefox(server.port)
    try:
        yield await browser.start()
    finally:
        await browser.close()
        await server.stop()


async def test_firefox_shows_what_is_pushed_while_the_page_is_closed(pushing, firefox):
    gateway = pushing.gateway
    alice = await gateway.connect("alice")
    lunch = await alice.create("group", "bob", name="Lunch")
    page = f"http://{gateway.client}/"
    await firefox.open(page)
    await firefox.until("document.querySelector('input') !== null")
    await firefox.run("document.querySelector('input').focus(); document.execCommand('insertText', false, 'bob');")
    await firefox.run("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Sign in').click();")
    bell = "document.querySelector('button[aria-label=Notifications]')"
    await firefox.until(f"{bell} !== null")
    await firefox.run(f"{bell}.click();")
    phone = await gateway.connect("bob")

    async def registered():
        return (await phone.ask("devices"))["items"]

    await eventually(registered)
    await phone.close()
    if pictures := os.environ.get("SCREENSHOTS"):
        await firefox.picture(f"{pictures}/firefox.png")
    # Another document of the same origin: the page is closed, its service worker stays.
    await firefox.open(f"{page}page.css")
    await alice.send(lunch, "See you at nine")

    async def shown():
        return await firefox.run(NOTES)

    assert await eventually(shown) == ["Lunch: alice: See you at nine"]
    await alice.send(lunch, "Bring the map")

    async def replaced():
        notes = await shown()
        return notes != ["Lunch: alice: See you at nine"] and notes

    # It takes the place of the first one. Firefox itself may have closed that one, and then nothing is counted.
    [note] = await eventually(replaced)
    assert note in ("Lunch (2 new): alice: Bring the map", "Lunch: alice: Bring the map")
    await alice.close()
