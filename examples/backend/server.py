"""A back end in Python that issues chat tokens to its users and serves a folder: python server.py FOLDER

Run pip install -r requirements.txt first. CHAT_SECRET is the secret in the gateway's auth.keys.
"""
import functools
import hashlib
import http.cookies
import http.server
import json
import os
import secrets
import sys
import time

import jwt

SECRET = os.environ.get("CHAT_SECRET", "")
if len(SECRET.encode()) < 32:
    sys.exit("CHAT_SECRET needs at least 32 bytes. Generate one with: openssl rand -base64 48")


def mint(user):
    """Returns a token of a user. The SDK asks for a new one before it expires."""
    return jwt.encode({"sub": user, "exp": int(time.time()) + 15 * 60}, SECRET, algorithm="HS256")


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.path != "/chat-token":
            return super().do_GET()
        # Put your own sign-in here. In this example a cookie makes each browser a visitor.
        cookie = http.cookies.SimpleCookie(self.headers.get("cookie", "")).get("session")
        session = cookie.value if cookie else secrets.token_urlsafe(24)
        # Other users see the user id, so it must not reveal the session.
        user = "visitor-" + hashlib.sha256(session.encode()).hexdigest()[:12]
        body = json.dumps({"token": mint(user)}).encode()
        self.send_response(200)
        if not cookie:
            self.send_header("set-cookie", f"session={session}; HttpOnly; SameSite=Lax; Path=/")
        self.send_header("content-type", "application/json")
        self.send_header("cache-control", "no-store")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


folder = sys.argv[1] if len(sys.argv) > 1 else "."
port = int(os.environ.get("PORT", "3000"))
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=folder))
print(f"http://localhost:{port}/", flush=True)
server.serve_forever()
