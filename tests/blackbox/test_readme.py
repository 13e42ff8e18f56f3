"""Runs the commands of README.md and docs/quickstart.md word for word, except for the port, which must be a free one."""
import json
import os
import re
import subprocess

import pytest

from support import ROOT, Gateway


def blocks():
    start = (ROOT / "README.md").read_text().split("## Start it")[1].split("\n## ")[0]
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    return re.findall(r"```(\w*)\n(.*?)```", start + quickstart, re.S)


@pytest.mark.embedded
def test_the_quickstart_does_what_the_page_shows(start, tmp_path):
    (_, run), (_, chat), (_, shown), (_, typed), (_, imported), (_, token) = blocks()
    assert run.strip() == "cargo run --release"
    gateway = start(str(tmp_path / "data"))
    script = chat.replace("/tmp/chat-client", str(tmp_path / "chat-client")).rstrip()
    script += f" ws://{gateway.client}/v1/ws"
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=gateway.env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown
    assert "websockets ws://127.0.0.1:8080/v1/ws" in typed
    asked = token.replace("127.0.0.1:8081", gateway.client)
    done = subprocess.run(["bash", "-euc", asked], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["token"].count(".") == 2, done
    assert gateway.stop() == 0
    done = subprocess.run(["bash", "-euc", imported], cwd=ROOT, env=gateway.env(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "messages imported" in done.stdout


@pytest.mark.embedded
def test_the_gateway_serves_without_any_setting(tmp_path):
    """Does what `cargo run --release` does in an empty directory. The default ports must be free."""
    import socket

    for port in (8080, 9090):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise AssertionError(f"port {port} is in use, so the default settings cannot be tested: stop the process that listens on it")
    gateway = Gateway(str(tmp_path))
    gateway.settings = {"log__format": "json"}
    os.chdir(tmp_path)
    try:
        gateway.start()
        assert (gateway.client, gateway.internal) == ("127.0.0.1:8080", "127.0.0.1:9090")
        assert any("development tokens" in line["message"] for line in gateway.log())
        assert gateway.command("health").stdout.strip() == '{"status":"ready"}'
        assert (tmp_path / "data" / "development.key").stat().st_mode & 0o077 == 0
    finally:
        os.chdir(ROOT)
        gateway.close()
