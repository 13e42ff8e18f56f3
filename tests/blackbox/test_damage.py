"""Damages of the directory of the embedded store: each is named with its file, and is seen by operators."""
import json
import pathlib
import subprocess
import urllib.error
import urllib.request
import uuid

import pytest

from support import BINARY, PATIENCE, UNLIMITED, Gateway, Refused, eventually

pytestmark = pytest.mark.embedded

MARKER = "qZ7kWv3XnE9s"


async def written(tmp_path, how="stop", messages=30):
    """A directory with one group, whose gateway is stopped or killed. Returns the gateway and the group."""
    gateway = Gateway(str(tmp_path / "data"), **UNLIMITED).start()
    alice = await gateway.connect("alice")
    group = await alice.create("group", "bob")
    for number in range(messages):
        await alice.send(group, f"{MARKER} {number}")
    await alice.close()
    if how == "stop":
        assert gateway.stop() == 0
    else:
        gateway.kill()
    return gateway, group


def refused(gateway):
    """Starts a gateway that must refuse to start, and returns what it says."""
    done = gateway.command(check=False)
    assert done.returncode == 1, done
    assert "did not answer" not in done.stderr and "Error:" not in done.stderr and "FjallError" not in done.stderr, done.stderr
    return done.stderr


def check(gateway, *arguments):
    done = gateway.command("check", *arguments, check=False)
    return done.returncode, done.stdout + done.stderr


def journals(gateway):
    return sorted(pathlib.Path(gateway.directory).glob("*.jnl"))


def content(journal):
    """Bytes of a journal without the zeros that fill it."""
    return len(journal.read_bytes().rstrip(b"\0"))


async def still_starts(gateway):
    """Accepts the loss, and uses the gateway."""
    code, output = check(gateway, "--accept-loss")
    assert code == 0 and "is whole" in output, output
    gateway.start()
    try:
        alice = await gateway.connect("alice")
        group = await alice.create("group", "carol")
        assert (await alice.send(group, "after it"))["seq"] > 0
        await alice.close()
        assert gateway.stop() == 0
        gateway.start()
        alice = await gateway.connect("alice")
        assert [message["body"] for message in await alice.everything(group) if message.get("body")] == ["after it"]
        await alice.close()
        assert gateway.stop() == 0
    finally:
        gateway.close()


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_missing_journal_is_named(tmp_path, how):
    gateway, _ = await written(tmp_path, how)
    for journal in journals(gateway):
        journal.unlink()
    for said in [refused(gateway), check(gateway)[1]]:
        assert str(tmp_path / "data") in said and ".jnl is missing" in said, said
    assert check(gateway)[0] == 1
    assert "Restore a backup" in refused(gateway)
    await still_starts(gateway)


@pytest.mark.parametrize("cut", ["half", "last byte", "everything"])
async def test_a_journal_that_was_truncated_after_a_clean_stop_is_named(tmp_path, cut):
    gateway, _ = await written(tmp_path)
    journal = journals(gateway)[-1]
    length = content(journal)
    with open(journal, "r+b") as file:
        file.truncate({"half": length // 2, "last byte": length - 1, "everything": 0}[cut])
    for said in [refused(gateway), check(gateway)[1]]:
        assert str(journal) in said and "bytes, and had" in said, said
    assert check(gateway)[0] == 1
    await still_starts(gateway)


async def test_a_journal_that_was_changed_after_a_clean_stop_is_named(tmp_path):
    gateway, _ = await written(tmp_path)
    journal = journals(gateway)[-1]
    whole = journal.read_bytes()
    for at in [whole.rindex(MARKER.encode()), 0, content(journal) - 1]:
        with open(journal, "r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
        assert f"{journal} was changed" in refused(gateway)
        code, output = check(gateway)
        assert code == 1 and f"{journal} was changed" in output, output
        journal.write_bytes(whole)
    assert check(gateway)[0] == 0


async def test_after_a_crash_an_incomplete_journal_is_ordinary(tmp_path):
    gateway, group = await written(tmp_path, "kill")
    journal = journals(gateway)[-1]
    with open(journal, "r+b") as file:
        file.truncate(content(journal) - 3)
    gateway.start()
    try:
        alice = await gateway.connect("alice")
        assert len(await alice.everything(group)) >= 29
        await alice.close()
        assert gateway.stop() == 0
    finally:
        gateway.close()
    code, output = check(gateway)
    assert code == 0 and "is whole" in output, output


def tables(gateway):
    """The tables with the texts of messages, which are in the first keyspace."""
    files = pathlib.Path(gateway.directory, "keyspaces", "1", "tables").iterdir()
    return [path for path in files if MARKER.encode() in path.read_bytes()]


def ready(gateway):
    try:
        answer = urllib.request.urlopen(f"http://{gateway.internal}/health/ready", timeout=PATIENCE)
        return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_a_damaged_table_is_named_and_ends_readiness(tmp_path):
    gateway, group = await written(tmp_path)
    gateway.command("compact")
    assert check(gateway)[0] == 0
    [table] = tables(gateway)
    whole = table.read_bytes()
    with open(table, "r+b") as file:
        file.seek(whole.index(MARKER.encode()))
        file.write(b"Q")
    code, output = check(gateway)
    assert code == 1 and f"{table} has other bytes" in output, output
    gateway.start()
    try:
        assert ready(gateway) == (200, {"status": "ready"})
        assert gateway.metrics()["chat_store_damaged"] == 0
        alice = await gateway.connect("alice")
        with pytest.raises(Refused) as error:
            await alice.everything(group)
        assert error.value.code == "unavailable"

        async def is_found():
            status, answer = ready(gateway)
            return status == 503 and answer["status"] == "store damaged" and str(table) in answer["reason"]

        await eventually(is_found)
        assert gateway.metrics()["chat_store_damaged"] == 1
        assert any(str(table) in str(line) and line["level"] == "ERROR" for line in gateway.log())
        await alice.close()
    finally:
        gateway.close()
    table.write_bytes(whole)
    gateway.start()
    try:
        alice = await gateway.connect("alice")
        assert len(await alice.everything(group)) >= 30
        assert ready(gateway)[0] == 200
        await alice.close()
    finally:
        gateway.close()


async def test_a_missing_table_is_named(tmp_path):
    gateway, _ = await written(tmp_path)
    gateway.command("compact")
    for table in tables(gateway):
        table.unlink()
    for said in [refused(gateway), check(gateway)[1]]:
        assert str(tmp_path / "data") in said and "missing" in said and "Restore a backup" in said, said
    assert check(gateway)[0] == 1


async def test_a_directory_in_use_is_not_called_damaged(start, tmp_path):
    gateway = start(str(tmp_path / "data"))
    for command in [(), ("check",), ("check", "--accept-loss"), ("compact",)]:
        done = gateway.command(*command, check=False)
        assert done.returncode == 1 and done.stderr == f"chat-gateway: {gateway.directory} is in use by another process\n" or not command, done
        assert "did not answer" not in done.stderr and "Locked" not in done.stderr and "damaged" not in done.stderr, done
    alice = await gateway.connect("alice")
    await alice.close()
    for path in [tmp_path, tmp_path / "nothing"]:
        done = subprocess.run([BINARY, "check", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and "is not the directory of a store" in done.stderr, done


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_file_without_which_tables_are_removed_is_named(tmp_path, how):
    gateway, group = await written(tmp_path, how)
    directory = pathlib.Path(gateway.directory)

    def files():
        """What is there, but the file of the checks themselves."""
        return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "journals.json"}

    bases = [directory / "version", *directory.glob("keyspaces/*/current")]
    assert len(bases) >= 3, bases
    for base in bases:
        content = base.read_bytes()
        for damage in [base.unlink, lambda: base.write_bytes(b"")]:
            damage()
            before = files()
            for said in [refused(gateway), check(gateway)[1], check(gateway, "--accept-loss")[1]]:
                assert f"{base} is missing or empty" in said, said
            assert check(gateway)[0] == 1 and files() == before, "nothing is removed"
            base.write_bytes(content)
    gateway.start()
    alice = await gateway.connect("alice")
    assert len([1 for message in await alice.everything(group) if message.get("body")]) == 30
    await alice.close()
    assert gateway.stop() == 0


async def test_a_lock_that_is_missing_is_made_again(tmp_path):
    gateway, _ = await written(tmp_path)
    (pathlib.Path(gateway.directory) / "lock").unlink()
    gateway.start()
    assert gateway.stop() == 0


async def test_the_logs_of_a_conversation_are_checked_while_no_gateway_runs(tmp_path):
    gateway, group = await written(tmp_path)
    for command in ("check", "mend"):
        done = gateway.command("store", command, group)
        assert "entries: 1 to 31 must be there, and are" in done.stdout and "nothing is missing" in done.stdout, done
        unknown = gateway.command("store", command, str(uuid.uuid4()), check=False)
        assert unknown.returncode == 1 and "no entry of conversation" in unknown.stderr, unknown
    gateway.start()
    for command in ("check", "mend"):
        used = gateway.command("store", command, group, check=False)
        assert used.returncode == 1 and "in use by another process" in used.stderr, used
    gateway.close()
