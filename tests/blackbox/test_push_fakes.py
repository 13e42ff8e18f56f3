"""The push services for tests refuse what the real ones refuse."""
import json
import ssl
import time

import http_ece
import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from push_fakes import APNS, FCM, WEB, PushFakes, base64url, decoded, point

pytestmark = pytest.mark.embedded


@pytest.fixture
def fakes(tmp_path):
    fakes = PushFakes(tmp_path).start()
    yield fakes
    fakes.stop()


@pytest.fixture
def http(fakes):
    trusted = ssl.create_default_context(cafile=str(fakes.root / "tls.pem"))
    with httpx.Client(verify=trusted, http2=True, base_url=fakes.origin) as http:
        yield http


def pushed(fakes, http, subscription, **changes):
    """Sends a notification as a gateway would, and returns the status."""
    sender = ec.generate_private_key(ec.SECP256R1())
    body = http_ece.encrypt(
        b'{"badge": 1}',
        private_key=sender,
        dh=decoded(subscription["keys"]["p256dh"]),
        auth_secret=decoded(subscription["keys"]["auth"]),
        version="aes128gcm",
    )
    claims = {"aud": changes.get("aud", fakes.origin), "exp": int(time.time()) + changes.get("valid", 3600), "sub": "mailto:a@b.org"}
    key = changes.get("key", fakes.vapid)
    token = jwt.encode(claims, key, "ES256")
    headers = {
        "authorization": f"vapid t={token}, k={base64url(point(key.public_key()))}",
        "content-encoding": "aes128gcm",
        "ttl": changes.get("ttl", "60"),
        "topic": changes.get("topic", "a" * 32),
        "urgency": "high",
    }
    return http.post(subscription["endpoint"], content=changes.get("body", body), headers=headers).status_code


def test_a_browser_gets_what_was_encrypted_and_signed_for_it(fakes, http):
    one, other = (fakes.subscribe(name) for name in ("one", "other"))
    assert pushed(fakes, http, one) == 201
    assert fakes.received[WEB][-1]["payload"] == {"badge": 1}
    another = ec.generate_private_key(ec.SECP256R1())
    for change, status in [
        ({"aud": "https://example.org"}, 403),
        ({"valid": -1}, 403),
        ({"valid": 25 * 3600}, 403),
        ({"key": another}, 403),
        ({"ttl": "never"}, 400),
        ({"topic": "a" * 33}, 400),
        ({"body": bytes(4097)}, 413),
        ({"body": bytes(100)}, 400),
    ]:
        assert pushed(fakes, http, one, **change) == status, change
    mixed = {"endpoint": one["endpoint"], "keys": other["keys"]}
    assert pushed(fakes, http, mixed) == 400
    assert pushed(fakes, http, {**one, "endpoint": f"{fakes.origin}/web/nobody"}) == 404
    fakes.answer(WEB, 429, retry_after=7)
    assert pushed(fakes, http, one) == 429


def test_fcm_wants_an_access_token_and_a_known_device(fakes, http):
    message = {"message": {"token": "phone", "data": {"chat": "{}"}, "android": {"ttl": "60s"}}}

    def send(token, message=message):
        answer = http.post("/v1/projects/chat-1/messages:send", json=message, headers={"authorization": f"Bearer {token}"})
        return answer.status_code, answer.json().get("error", {}).get("status")

    assert send("guessed") == (401, "UNAUTHENTICATED")
    now = int(time.time())
    claims = {"iss": fakes.EMAIL, "aud": f"{fakes.origin}/token", "iat": now, "exp": now + 3600}
    claims["scope"] = "https://www.googleapis.com/auth/firebase.messaging"

    def granted(claims, key=fakes.account):
        form = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": jwt.encode(claims, key, "RS256")}
        return http.post("/token", data=form)

    assert granted({**claims, "iss": "another@example.org"}).status_code == 400
    assert granted({**claims, "exp": now + 3601}).status_code == 400
    token = granted(claims).json()["access_token"]
    assert send(token) == (404, "NOT_FOUND")
    fakes.devices.add("phone")
    assert send(token) == (200, None)
    for data in ({"from": "bob"}, {"badge": 3}, {"chat": "x" * 4097}):
        assert send(token, {"message": {**message["message"], "data": data}}) == (400, "INVALID_ARGUMENT"), data
    assert fakes.received[FCM][2]["message"]["token"] == "phone"


def test_apns_wants_http_2_and_a_token_of_the_last_hour(fakes, http):
    device = "ab" * 32
    fakes.devices.add(device)

    def send(http=http, device=device, age=0, aps=None, **changes):
        token = jwt.encode({"iss": fakes.TEAM_ID, "iat": int(time.time()) - age}, fakes.p8, "ES256", {"kid": fakes.KEY_ID})
        headers = {
            "authorization": f"bearer {token}",
            "apns-topic": fakes.TOPIC,
            "apns-push-type": "alert",
            "apns-priority": "10",
            "apns-expiration": str(int(time.time()) + 60),
        }
        body = {"aps": {"badge": 1} if aps is None else aps}
        changes = {name.replace("_", "-"): value for name, value in changes.items()}
        answer = http.post(f"/3/device/{device}", json=body, headers={**headers, **changes})
        return answer.status_code, json.loads(answer.content or "{}").get("reason")

    assert send() == (200, None)
    assert fakes.received[APNS][-1]["payload"] == {"aps": {"badge": 1}}
    assert send(age=3700) == (403, "ExpiredProviderToken")
    assert send(device="cd" * 32) == (400, "BadDeviceToken")
    assert send(apns_topic="org.example.other") == (400, "DeviceTokenNotForTopic")
    assert send(apns_push_type="background") == (400, "InvalidPushType")
    assert send(aps={"content-available": 1}) == (400, "InvalidPushType")
    assert send(aps={"content-available": 1}, apns_push_type="background") == (200, None)
    assert send(apns_collapse_id="x" * 65) == (400, "BadCollapseId")
    trusted = ssl.create_default_context(cafile=str(fakes.root / "tls.pem"))
    with httpx.Client(verify=trusted, http2=False, base_url=fakes.origin) as old:
        assert send(http=old) == (505, "HTTP/2 only")
