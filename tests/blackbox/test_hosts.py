"""Which hosts the ports of a gateway answer to."""
import asyncio

import httpx
import pytest

from support import PATIENCE, within


@pytest.mark.embedded
async def test_internal_port_answers_only_to_hosts_that_no_page_can_have(start):
    """DNS rebinding: a page makes its own name resolve to this machine, and its requests name it in `Host`."""
    gateway = start(internal__hosts='["gateway-1", "metrics.example"]')
    port = gateway.internal.rsplit(":", 1)[1]
    async with httpx.AsyncClient(base_url=f"http://{gateway.internal}", timeout=PATIENCE) as http:
        for path in ("/metrics", "/health/ready", "/health/live", "/nowhere"):
            for host in (gateway.internal, f"localhost:{port}", f"[::1]:{port}", "10.0.0.7", "Gateway-1", f"METRICS.example:{port}"):
                assert (await http.get(path, headers={"host": host})).status_code in (200, 404), host
            for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "gateway-2", "127.0.0.1.evil.example"):
                answer = await http.get(path, headers={"host": host})
                assert (answer.status_code, answer.json()["code"]) == (421, "forbidden"), (path, host)
                assert "internal.hosts" in answer.json()["message"]
    # The target comes before the header.
    reader, writer = await asyncio.open_connection(*gateway.internal.rsplit(":", 1))
    writer.write(f"GET http://evil.example/metrics HTTP/1.1\r\nHost: {gateway.internal}\r\nConnection: close\r\n\r\n".encode())
    assert (await within(reader.read(), PATIENCE)).startswith(b"HTTP/1.1 421 ")
    writer.close()
    gateway.settings["internal__listen"] = gateway.internal
    assert gateway.command("health").stdout.strip() == '{"status":"ready"}'


@pytest.mark.embedded
async def test_the_own_page_may_connect_whatever_form_its_host_has(start):
    gateway = start(client__origins='["https://App.example"]')

    async def status(host, origin):
        """The answer to an upgrade."""
        reader, writer = await asyncio.open_connection(*gateway.client.rsplit(":", 1))
        head = f"GET /v1/ws HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        writer.write(f"{head}Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode())
        line = await within(reader.readline(), PATIENCE)
        writer.close()
        return int(line.split()[1])

    for host, origin in [
        ("chat.example", "https://chat.example"), ("chat.example:443", "https://chat.example"), ("Chat.Example", "https://chat.example"),
        ("chat.example:80", "http://chat.example"), (gateway.client, f"http://{gateway.client}"),
        ("chat.example", "https://app.example"), ("chat.example", "https://app.example:443"),
    ]:
        assert await status(host, origin) == 101, (host, origin)
    for host, origin in [
        ("chat.example", "https://evil.example"), ("chat.example:443", "http://chat.example"), ("chat.example", "https://chat.example:8443"),
        ("chat.example", "http://app.example"), ("chat.example", "null"), ("chat.example", "https://chat.example.evil.example"),
    ]:
        assert await status(host, origin) == 403, (host, origin)

