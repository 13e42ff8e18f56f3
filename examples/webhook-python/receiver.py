"""Receives the gateway's webhooks and searches the messages: python receiver.py

Run pip install -r requirements.txt first. WEBHOOK_SECRET is a secret of the webhook in the gateway's configuration.
"""
import http.server
import json
import os
import urllib.parse

import standardwebhooks

webhook = standardwebhooks.Webhook(os.environ["WEBHOOK_SECRET"])
messages = {}


def apply(event):
    """Applies an event. Events may come again, so applying one twice must do no harm."""
    kind, data = event["type"], event["data"]
    if kind == "message.created" and "deleted" not in data:
        messages[data["conversation"], data["seq"]] = data
    elif kind == "message.updated" and (data["conversation"], data["seq"]) in messages:
        messages[data["conversation"], data["seq"]]["body"] = data.get("body", "")
    elif kind == "message.deleted":
        for seq in data["seqs"]:
            messages.pop((data["conversation"], seq), None)


class Receiver(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        try:
            event = webhook.verify(body, {name.lower(): value for name, value in self.headers.items()})
        except standardwebhooks.WebhookVerificationError as error:
            return self.answer(400, str(error))
        for each in event["data"]["events"] if event["type"] == "batch" else [event]:
            apply(each)
        self.answer(204)

    def do_GET(self):
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("q", [""])[0]
        self.answer(200, json.dumps([message for message in messages.values() if query in message["body"]]))

    def answer(self, status, text=""):
        self.send_response(status)
        if status != 204:
            self.send_header("content-type", "application/json" if status == 200 else "text/plain")
            self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "3001"))), Receiver)
print("waiting for webhooks", flush=True)
server.serve_forever()
