"""Answers each direct message to its user with the same text: python bot.py

It hears messages by webhooks and answers by HTTP, as a back end that acts for the user `echo`. Run pip install -r
requirements.txt first. WEBHOOK_SECRET is a secret of the webhook in the gateway's configuration. SERVICE_TOKEN is a token with
role `service` and scope `messages:write`.
"""
import http.server
import json
import os
import urllib.error
import urllib.request
import uuid

import standardwebhooks

GATEWAY = os.environ.get("GATEWAY", "http://127.0.0.1:8080")
TOKEN = os.environ["SERVICE_TOKEN"]
BOT = os.environ.get("BOT", "echo")
webhook = standardwebhooks.Webhook(os.environ["WEBHOOK_SECRET"])


def answer_message(message):
    """Sends the text of a message back. Returns whether the gateway has the answer, or refuses it for good."""
    if message["sender"] == BOT or message["kind"] != "text" or message["conversation_kind"] != "dm" or not message["body"]:
        return True
    # An event may come again. The same client id stores the answer only once.
    client_id = str(uuid.uuid5(uuid.UUID(message["message_id"]), BOT))
    sent = {"client_id": client_id, "body": message["body"], "reply_to": message["seq"], "retry": True}
    request = urllib.request.Request(
        f"{GATEWAY}/v1/conversations/{message['conversation']}/messages",
        json.dumps(sent).encode(),
        {"authorization": f"Bearer {TOKEN}", "chat-user": BOT, "content-type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        # 403 and 404: the bot is not in this conversation.
        return error.code not in (408, 429) and error.code < 500
    except OSError:
        return False
    return True


class Bot(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            event = webhook.verify(body, {name.lower(): value for name, value in self.headers.items()})
        except standardwebhooks.WebhookVerificationError:
            return self.finish_with(400)
        events = event["data"]["events"] if event["type"] == "batch" else [event]
        messages = [each["data"] for each in events if each["type"] == "message.created"]
        # With 503 the gateway sends the event again later.
        self.finish_with(204 if all([answer_message(message) for message in messages]) else 503)

    def finish_with(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3001"))), Bot)
print("waiting for messages", flush=True)
server.serve_forever()
