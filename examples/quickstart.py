"""Two users chat; one disconnects and comes back. Needs only the package `websockets`. docs/protocol.md describes the frames."""
import asyncio
import json
import sys
import uuid

import websockets


class Person:
    def __init__(self, name, token):
        self.name, self.token, self.cursors = name, token, {}

    async def connect(self):
        self.socket = await websockets.connect(SERVER, subprotocols=["chat.v1.json"], proxy=None)
        self.waiting = []
        await self.ask(type="connect", token=self.token, cursors=self.cursors)

    async def ask(self, **request):
        """Sends a request and returns its reply. Events that come before the reply are kept for `hear`."""
        id = request["id"] = uuid.uuid4().int >> 96
        await self.socket.send(json.dumps(request))
        while True:
            frame = json.loads(await self.socket.recv())
            if frame.get("id") == id:
                assert frame["type"] != "error", frame
                return frame
            self.waiting.append(frame)

    async def say(self, conversation, body):
        # The client id makes a retry safe: a message that is sent twice is stored once.
        sent = await self.ask(type="send", conversation=conversation, client_id=str(uuid.uuid4()), body=body)
        print(f"  {self.name} says {body!r}: stored as number {sent['seq']}")

    async def hear(self):
        """Returns the next text message."""
        while True:
            event = self.waiting.pop(0) if self.waiting else json.loads(await self.socket.recv())
            if event["type"] == "message":
                self.cursors[event["conversation"]] = [event["seq"], 0]
                if event["kind"] == "text":
                    print(f"  {self.name} hears number {event['seq']} from {event['sender']}: {event['body']!r}")
                    return event


async def main(alice_token, bob_token):
    alice, bob = Person("alice", alice_token), Person("bob", bob_token)
    await alice.connect()
    await bob.connect()
    print("A direct chat and a group:")
    dm = (await alice.ask(type="create", kind="dm", participants=["bob"]))["conversation"]
    group = (await alice.ask(type="create", kind="group", participants=["bob", "carol"], name="Lunch"))["conversation"]
    await alice.say(dm, "Hi Bob!")
    await alice.say(group, "Who is hungry?")
    await bob.hear()
    await bob.hear()

    print("Bob goes away, and misses something:")
    await bob.socket.close()
    for body in ("Pizza?", "Last call!"):
        await alice.say(group, body)

    print("Bob comes back with his cursors:")
    await bob.connect()
    await bob.hear()
    newest = await bob.hear()
    for item in (await bob.ask(type="inbox"))["items"]:
        if item["last_message"]:
            print(f"  inbox: {item['name']}: {item['unread']} unread, last {item['last_message']['preview']!r}")
    await bob.ask(type="read", conversation=group, seq=newest["seq"])
    page = await bob.ask(type="history", conversation=group, before=newest["seq"], limit=10)
    print(f"  one page back: {[m['body'] or m['system']['change'] for m in page['messages']]}")
    unread = {item["name"]: item["unread"] for item in (await bob.ask(type="inbox"))["items"]}
    print(f"  read to the end: {unread['Lunch']} unread in Lunch")


SERVER = sys.argv[3] if len(sys.argv) > 3 else "ws://127.0.0.1:8080/v1/ws"
asyncio.run(main(sys.argv[1], sys.argv[2]))
